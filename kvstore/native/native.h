/* What the parts of the extension have in common. */
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <stddef.h>
#include <stdint.h>

/* calls.c */
PyObject *move(PyObject *module, PyObject *arguments);
PyObject *move_all(PyObject *module, PyObject *arguments);
PyObject *of_paths(PyObject *module, PyObject *arguments);
PyObject *lock_all(PyObject *module, PyObject *arguments);

/* checksum.c */
PyObject *copy(PyObject *module, PyObject *arguments);
int sums(void); /* whether this processor can do what the rest of this is for */
uint32_t sum_up(uint32_t crc, const void *from, size_t length); /* CRC-32C, going on from `crc` */
