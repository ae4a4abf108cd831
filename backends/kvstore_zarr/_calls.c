/* `calls.move` without the GIL: a part of a block between memory and its file, with all that it asks of the system.
 *
 * Why this is not Python: each call that Python makes of the system lets go of the GIL and has to get it back. This lets
 * go of it once. It holds nothing between two calls; what it does, and why, stands in `calls.py`, whose
 * `move_in_python` does the same.
 */
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN, LOCK, EXPECT, MOVE, SYNC, LOOK, CLOSE, DONE }; /* as `calls.Step` */
enum { GO_ON, END, END_SYNCED };                            /* as `calls.Then` */

typedef struct {
    int writing, fd, flags, then;
    long long number; /* the mode of a new file, or the size of one that is read */
    long long offset;
    const char *path;
    struct iovec pieces[2];
    struct stat status;
} Job;

/* Moves everything, however many calls that takes; 0, or an errno. */
static int transfer(Job *job)
{
    struct iovec *next = job->pieces;
    int left = 2;
    size_t moved = 0;
    off_t offset = (off_t)job->offset;

    for (;;) {
        for (; left > 0 && moved >= next->iov_len; left--)
            moved -= (next++)->iov_len;
        if (left == 0)
            return 0;
        next->iov_base = (char *)next->iov_base + moved;
        next->iov_len -= moved;
        ssize_t done;
        do
            done = job->writing ? pwritev(job->fd, next, left, offset) : preadv(job->fd, next, left, offset);
        while (done < 0 && errno == EINTR);
        if (done < 0)
            return errno;
        if (done == 0)
            return job->writing ? EIO : ENODATA;
        moved = (size_t)done;
        offset += done;
    }
}

static int retried(Job *job, int step)
{
    int outcome;
    do
        switch (step) {
        case OPEN:
            outcome = job->fd = open(job->path, job->flags, (mode_t)job->number);
            break;
        case LOCK:
            outcome = flock(job->fd, LOCK_SH | LOCK_NB);
            break;
        case SYNC:
            outcome = fsync(job->fd);
            break;
        default:
            outcome = fstat(job->fd, &job->status);
        }
    while (outcome < 0 && errno == EINTR);
    return outcome < 0 ? errno : 0;
}

/* Takes all steps, up to one that fails; its errno, and which it is. */
static int run(Job *job, int *step)
{
    int error = 0;

    if (job->fd < 0) {
        if ((error = retried(job, *step = OPEN)))
            return error;
        if (!job->writing) {
            if ((error = retried(job, *step = LOCK)) || (error = retried(job, *step = EXPECT)))
                return error;
            if ((long long)job->status.st_size != job->number)
                return EBADMSG;
        }
    }
    *step = MOVE;
    if ((error = transfer(job)))
        return error;
    if (job->then == END_SYNCED && (error = retried(job, *step = SYNC)))
        return error;
    if (job->then != GO_ON) {
        if (job->writing && (error = retried(job, *step = LOOK)))
            return error;
        *step = CLOSE;
        flock(job->fd, LOCK_UN);
        int closed = close(job->fd); /* gone, whatever it says */
        job->fd = -1;
        if (closed < 0 && errno != EINTR)
            return errno;
    }
    *step = DONE;
    return 0;
}

static PyObject *move(PyObject *module, PyObject *arguments)
{
    Job job = {0};
    int step = DONE, error = 0, held = 0;
    PyObject *path, *pieces[2], *outcome = NULL;
    Py_buffer buffers[2];

    (void)module;
    if (!PyArg_ParseTuple(arguments, "piO&iLLOOi", &job.writing, &job.fd, PyUnicode_FSConverter, &path, &job.flags,
                          &job.number, &job.offset, &pieces[0], &pieces[1], &job.then))
        return NULL;
    job.path = PyBytes_AsString(path);
    for (; held < 2 && pieces[held] != Py_None; held++) {
        if (PyObject_GetBuffer(pieces[held], &buffers[held], job.writing ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0)
            goto end;
        job.pieces[held] = (struct iovec){buffers[held].buf, (size_t)buffers[held].len};
    }
    Py_BEGIN_ALLOW_THREADS
    error = run(&job, &step);
    Py_END_ALLOW_THREADS
    outcome = Py_BuildValue("iiiILK", error, step, job.fd, (unsigned)job.status.st_mode,
                            (long long)job.status.st_blocks * 512, (unsigned long long)job.status.st_ino);
end:
    while (held > 0)
        PyBuffer_Release(&buffers[--held]);
    Py_DECREF(path);
    return outcome;
}

static PyMethodDef methods[] = {{"move", move, METH_VARARGS, "See calls.move_in_python."}, {NULL, NULL, 0, NULL}};

static int fill(PyObject *module)
{
    return PyModule_AddStringConstant(module, "SOURCE", SOURCE); /* what this was compiled from (`compiling`) */
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)fill}, {0, NULL}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_calls", .m_methods = methods, .m_slots = slots};

PyMODINIT_FUNC PyInit__calls(void);
PyMODINIT_FUNC PyInit__calls(void)
{
    return PyModuleDef_Init(&definition);
}
