/* CRC-32C, alone or on the way of a copy: each byte is read once, summed up in the register it was read into, and
 * written.
 *
 * Remainders are kept for sixteen lanes of 128 bits and folded over by carry-less multiplication (Gopal et al., "Fast CRC
 * Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009), four registers of 512 bits at a time.
 * What is left in the end goes through the processor's own CRC-32C. It takes AVX-512 and VPCLMULQDQ (Ice Lake, Zen 4 and
 * later): in registers of 128 bits it is slower than a copy and a library's checksum after it, which is what Python
 * does on other processors.
 */
#include "native.h"

#include <string.h>

enum { RELEASED_FROM = 64 << 10 }; /* to let go of the GIL costs as much as to copy some 64 KiB */

#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 8)
#include <immintrin.h>

#define NARROW __attribute__((target("pclmul,sse4.2")))
#define WIDE __attribute__((target("avx512f,avx512dq,avx512vl,vpclmulqdq,pclmul,sse4.2")))

/* Two constants for each distance of D bits, bits reversed: x^(D+31) and x^(D-33), modulo the polynomial. */
static const uint32_t OVER[][2] = {{0xf20c0dfe, 0x493c7d27}, {0x740eef02, 0x9e4addf8}, {0xdcb17aa4, 0xb9e02b86}};
enum { BY_128, BY_512, BY_2048 };

NARROW static inline __m128i folded(__m128i remainder, int by, __m128i next)
{
    __m128i over = _mm_setr_epi32((int)OVER[by][0], 0, (int)OVER[by][1], 0);
    __m128i low = _mm_clmulepi64_si128(remainder, over, 0x00), high = _mm_clmulepi64_si128(remainder, over, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

WIDE static inline __m512i distance(int by)
{
    return _mm512_broadcast_i32x4(_mm_setr_epi32((int)OVER[by][0], 0, (int)OVER[by][1], 0));
}

WIDE static inline __m512i folded_wide(__m512i remainder, __m512i over, __m512i next)
{
    __m512i low = _mm512_clmulepi64_epi128(remainder, over, 0x00);
    __m512i high = _mm512_clmulepi64_epi128(remainder, over, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, 0x96); /* all three, exclusive or */
}

/* What is left when all lanes are in one, and the last bytes. */
NARROW static uint32_t finished(uint32_t crc, uint8_t *into, const uint8_t *from, size_t length)
{
    if (into)
        memcpy(into, from, length);
    for (; length >= 8; from += 8, length -= 8) {
        uint64_t word;
        memcpy(&word, from, 8);
        crc = (uint32_t)_mm_crc32_u64(crc, word);
    }
    for (; length; length--)
        crc = _mm_crc32_u8(crc, *from++);
    return crc;
}

NARROW static uint32_t reduced(__m128i remainder)
{
    uint64_t crc = _mm_crc32_u64(0, (uint64_t)_mm_extract_epi64(remainder, 0));
    return (uint32_t)_mm_crc32_u64(crc, (uint64_t)_mm_extract_epi64(remainder, 1));
}

/* Without `into` nothing is copied: inlined for either. */
WIDE static inline __attribute__((always_inline)) uint32_t summed(uint32_t crc, uint8_t *into, const uint8_t *from,
                                                                  size_t length)
{
    __m512i lanes[4], next, over = distance(BY_2048);
    size_t done;

    if (length < 256)
        return ~finished(~crc, into, from, length);

#pragma GCC unroll 4
    for (int lane = 0; lane < 4; lane++) {
        lanes[lane] = _mm512_loadu_si512(from + 64 * lane);
        if (into)
            _mm512_storeu_si512(into + 64 * lane, lanes[lane]);
    }
    lanes[0] = _mm512_xor_si512(lanes[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)~crc)));
    for (done = 256; length - done >= 256; done += 256)
#pragma GCC unroll 4
        for (int lane = 0; lane < 4; lane++) {
            next = _mm512_loadu_si512(from + done + 64 * lane);
            if (into)
                _mm512_storeu_si512(into + done + 64 * lane, next);
            lanes[lane] = folded_wide(lanes[lane], over, next);
        }
    over = distance(BY_512);
#pragma GCC unroll 4
    for (int lane = 1; lane < 4; lane++)
        lanes[lane] = folded_wide(lanes[lane - 1], over, lanes[lane]);

    __m128i sum = _mm512_extracti32x4_epi32(lanes[3], 0);
    sum = folded(sum, BY_128, _mm512_extracti32x4_epi32(lanes[3], 1));
    sum = folded(sum, BY_128, _mm512_extracti32x4_epi32(lanes[3], 2));
    sum = folded(sum, BY_128, _mm512_extracti32x4_epi32(lanes[3], 3));
    return ~finished(reduced(sum), into ? into + done : NULL, from + done, length - done);
}

WIDE uint32_t sum_up(uint32_t crc, const void *from, size_t length)
{
    return summed(crc, NULL, from, length);
}

WIDE static uint32_t copy_and_sum(uint32_t crc, void *into, const void *from, size_t length)
{
    return summed(crc, into, from, length);
}

int sums(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("vpclmulqdq") &&
           __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.2");
}
#else
uint32_t sum_up(uint32_t crc, const void *from, size_t length)
{
    (void)from, (void)length;
    return crc;
}

static uint32_t copy_and_sum(uint32_t crc, void *into, const void *from, size_t length)
{
    (void)into;
    return sum_up(crc, from, length);
}

int sums(void)
{
    return 0;
}
#endif

PyObject *copy(PyObject *module, PyObject *arguments)
{
    PyObject *objects[2], *outcome = NULL;
    Py_buffer into, from;
    unsigned crc = 0;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "OO|I", &objects[0], &objects[1], &crc))
        return NULL;
    if (PyObject_GetBuffer(objects[0], &into, PyBUF_WRITABLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(objects[1], &from, PyBUF_SIMPLE) == 0) {
        if (into.len != from.len)
            PyErr_Format(PyExc_ValueError, "%zd bytes do not fit into %zd", from.len, into.len);
        else if (!sums())
            PyErr_SetString(PyExc_NotImplementedError, "not on this processor");
        else {
            if (into.len < RELEASED_FROM)
                crc = copy_and_sum(crc, into.buf, from.buf, (size_t)from.len);
            else {
                Py_BEGIN_ALLOW_THREADS
                crc = copy_and_sum(crc, into.buf, from.buf, (size_t)from.len);
                Py_END_ALLOW_THREADS
            }
            outcome = PyLong_FromUnsignedLong(crc);
        }
        PyBuffer_Release(&from);
    }
    PyBuffer_Release(&into);
    return outcome;
}
