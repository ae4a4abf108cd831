/* What a block, and what the blocks of a job together, ask of the system, without the GIL.
 *
 * Why this is not Python: each call that Python makes of the system lets go of the GIL and has to get it back. This lets
 * go of it once. What it does, and why, stands in `kvstore_zarr.calls`, where Python does the same.
 */
#include "native.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN, LOCK, EXPECT, MOVE, SYNC, LOOK, CLOSE, DONE }; /* as `kvstore_zarr.calls.Step` */
enum { GO_ON, END, END_SYNCED };                            /* as `kvstore_zarr.calls.Then` */

typedef struct {
    int writing, fd, flags, then;
    long long number; /* the mode of a new file, or the size of one that is read */
    long long offset;
    const char *path;
    struct iovec pieces[2];
    long at, until; /* where two checksums stand in the second piece that is written; `until` is 0 where none do */
    long long crc;  /* of the first piece, and of those before it; -1: it is not wanted */
    struct stat status;
    int error, step; /* what it came to: an errno, and of which step */
    PyObject *held_path;
    Py_buffer buffers[2];
    int held;
} Job;

/* The first piece's checksum, continued by what stands before its place, and that of all from there on. */
static void seal(Job *job)
{
    uint8_t *closing = job->pieces[1].iov_base;

    job->crc = sum_up((uint32_t)job->crc, job->pieces[0].iov_base, job->pieces[0].iov_len);
    if (job->until) {
        uint32_t crc = htole32(sum_up((uint32_t)job->crc, closing, (size_t)job->at));
        memcpy(closing + job->at, &crc, sizeof crc);
        crc = htole32(sum_up(0, closing + job->at, (size_t)(job->until - job->at)));
        memcpy(closing + job->until, &crc, sizeof crc);
    }
}

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
static int tried(Job *job, int *step)
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
    int is_summed = job->crc >= 0 && sums();
    if (is_summed && job->writing)
        seal(job);
    struct iovec body = job->pieces[0]; /* `transfer` moves on in them */
    if ((error = transfer(job)))
        return error;
    if (is_summed && !job->writing)
        job->crc = sum_up((uint32_t)job->crc, body.iov_base, body.iov_len);
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

static void run(Job *job)
{
    job->step = DONE;
    job->error = tried(job, &job->step);
}

/* A job as Python describes it, whose buffers and path are held until `let_go`; 0, or -1 with an exception. */
static int understand(Job *job, PyObject *arguments)
{
    PyObject *pieces[2];

    if (!PyArg_ParseTuple(arguments, "piO&iLLOOiLll", &job->writing, &job->fd, PyUnicode_FSConverter, &job->held_path,
                          &job->flags, &job->number, &job->offset, &pieces[0], &pieces[1], &job->then, &job->crc,
                          &job->at, &job->until))
        return -1;
    job->path = PyBytes_AsString(job->held_path);
    for (int i; (i = job->held) < 2 && pieces[i] != Py_None; job->held++) {
        int is_changed = !job->writing || (i == 1 && job->until);
        if (PyObject_GetBuffer(pieces[i], &job->buffers[i], is_changed ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
            return -1;
        job->pieces[i] = (struct iovec){job->buffers[i].buf, (size_t)job->buffers[i].len};
    }
    if (job->until && (job->at < 0 || job->at + 4 > job->until || job->until + 4 > (long)job->pieces[1].iov_len)) {
        PyErr_SetString(PyExc_ValueError, "no room for the checksums");
        return -1;
    }
    return 0;
}

static void let_go(Job *job)
{
    while (job->held > 0)
        PyBuffer_Release(&job->buffers[--job->held]);
    Py_CLEAR(job->held_path);
}

static PyObject *said(const Job *job)
{
    return Py_BuildValue("iiiILKL", job->error, job->step, job->fd, (unsigned)job->status.st_mode,
                         (long long)job->status.st_blocks * 512, (unsigned long long)job->status.st_ino, job->crc);
}

PyObject *move(PyObject *module, PyObject *arguments)
{
    Job job = {0};
    PyObject *outcome = NULL;

    (void)module;
    if (understand(&job, arguments) == 0) {
        Py_BEGIN_ALLOW_THREADS
        run(&job);
        Py_END_ALLOW_THREADS
        outcome = said(&job);
    }
    let_go(&job);
    return outcome;
}

PyObject *move_all(PyObject *module, PyObject *arguments)
{
    PyObject *list, *outcomes = NULL;
    Py_ssize_t count, known = 0;
    Job *jobs;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!", &PyList_Type, &list))
        return NULL;
    count = PyList_Size(list);
    if (!(jobs = PyMem_Calloc((size_t)count + 1, sizeof *jobs)))
        return PyErr_NoMemory();
    while (known < count && !PyErr_Occurred()) {
        PyObject *item = PyList_GetItem(list, known);
        if (PyTuple_Check(item))
            understand(&jobs[known], item);
        else
            PyErr_SetString(PyExc_TypeError, "each job is a tuple");
        known++;
    }
    if (!PyErr_Occurred()) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < count; i++)
            run(&jobs[i]);
        Py_END_ALLOW_THREADS
        outcomes = PyList_New(count);
        for (Py_ssize_t i = 0; outcomes && i < count; i++)
            if (PyList_SetItem(outcomes, i, said(&jobs[i])) < 0)
                Py_CLEAR(outcomes);
    }
    while (known > 0)
        let_go(&jobs[--known]);
    PyMem_Free(jobs);
    return outcomes;
}

/* The strings of a list as paths, which `held` keeps; NULL, with an exception, if they are none. */
static const char **paths_of(PyObject *list, Py_ssize_t count, PyObject **held)
{
    const char **paths = PyMem_Calloc((size_t)count + 1, sizeof *paths);
    PyObject *path;

    *held = PyList_New(count);
    if (!paths || !*held) {
        PyMem_Free(paths);
        return (const char **)PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyList_GetItem(list, i);
        if (!item || !PyUnicode_FSConverter(item, &path)) {
            PyMem_Free(paths);
            return NULL;
        }
        PyList_SetItem(*held, i, path);
        paths[i] = PyBytes_AsString(path);
    }
    return paths;
}

static long long occupied(const char *path)
{
    struct stat status;
    return lstat(path, &status) < 0 ? -(long long)errno : (long long)status.st_blocks * 512;
}

/* Each path of a list is renamed to that of a second one, or it is asked what it occupies; errors are negative. */
PyObject *of_paths(PyObject *module, PyObject *arguments)
{
    PyObject *lists[2] = {NULL, NULL}, *held[2] = {NULL, NULL}, *outcome = NULL;
    const char **paths[2] = {NULL, NULL};
    long long *values;
    Py_ssize_t count;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!|O!", &PyList_Type, &lists[0], &PyList_Type, &lists[1]))
        return NULL;
    count = PyList_Size(lists[0]);
    if (!(values = PyMem_Calloc((size_t)count + 1, sizeof *values)))
        return PyErr_NoMemory();
    for (int i = 0; i < 2 && lists[i]; i++)
        if (!(paths[i] = paths_of(lists[i], count, &held[i])))
            goto end;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++)
        if (paths[1])
            values[i] = rename(paths[0][i], paths[1][i]) < 0 ? -errno : 0;
        else
            values[i] = occupied(paths[0][i]);
    Py_END_ALLOW_THREADS
    outcome = PyList_New(count);
    for (Py_ssize_t i = 0; outcome && i < count; i++)
        if (PyList_SetItem(outcome, i, PyLong_FromLongLong(values[i])) < 0)
            Py_CLEAR(outcome);
end:
    PyMem_Free(values);
    for (int i = 0; i < 2; i++) {
        PyMem_Free(paths[i]);
        Py_XDECREF(held[i]);
    }
    return outcome;
}

/* Locks single bytes of a file, in their order, up to one that somebody has; how many. */
PyObject *lock_all(PyObject *module, PyObject *arguments)
{
    PyObject *list;
    long long *offsets;
    Py_ssize_t count, done;
    int fd, error = 0;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "iO!", &fd, &PyList_Type, &list))
        return NULL;
    count = PyList_Size(list);
    if (!(offsets = PyMem_Calloc((size_t)count + 1, sizeof *offsets)))
        return PyErr_NoMemory();
    for (done = 0; done < count && !PyErr_Occurred(); done++)
        offsets[done] = PyLong_AsLongLong(PyList_GetItem(list, done));
    if (!PyErr_Occurred()) {
        Py_BEGIN_ALLOW_THREADS
        for (done = 0; done < count; done++) {
            struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = offsets[done], .l_len = 1};
            if (fcntl(fd, F_OFD_SETLK, &lock) < 0) {
                error = errno;
                break;
            }
        }
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(offsets);
    if (error && error != EAGAIN && error != EACCES) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(done);
}
