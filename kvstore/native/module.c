/* `kvstore.native._native`: its functions, and what it was compiled from. It holds nothing between two calls. */
#include "native.h"

static PyMethodDef calls[] = {
    {"move", move, METH_VARARGS, "See kvstore_zarr.calls.Calls.move."},
    {"move_all", move_all, METH_VARARGS, "See kvstore_zarr.calls.Calls.move_all."},
    {"of_paths", of_paths, METH_VARARGS, "See kvstore_zarr.calls.Calls.of_paths."},
    {"lock_all", lock_all, METH_VARARGS, "See kvstore_zarr.calls.Calls.lock_all."},
    {"copy", copy, METH_VARARGS, "See kvstore.integrity.copied."},
    {NULL, NULL, 0, NULL},
};

static int fill(PyObject *module)
{
    if (PyModule_AddStringConstant(module, "SOURCE", SOURCE) < 0) /* what this was compiled from (`compiling`) */
        return -1;
    return PyModule_AddIntConstant(module, "SUMS", sums());
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)fill}, {0, NULL}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_native", .m_methods = calls, .m_slots = slots};

PyMODINIT_FUNC PyInit__native(void);
PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
