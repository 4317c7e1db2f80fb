/* Compiled into the native core for tests: calls that may run out of memory fail at random, one in `gradsan_failing`. Only
 * the core's own calls do; torch, which does not survive a failing allocation, sees none. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

__attribute__((weak)) int gradsan_failing = 0;
__attribute__((weak)) long long gradsan_failed = 0;
__attribute__((weak)) unsigned long long gradsan_seed = 1;

static int fails_now(void)
{
    if (gradsan_failing == 0)
        return 0;
    gradsan_seed = gradsan_seed * 6364136223846793005ULL + 1442695040888963407ULL;
    int fails = (gradsan_seed >> 33) % (unsigned)gradsan_failing == 0;
    gradsan_failed += fails;
    return fails;
}

#undef PyObject_NewVar
#define PyObject_NewVar(type, typeobj, n) (fails_now() ? (type *)PyErr_NoMemory() : (type *)_PyObject_NewVar(typeobj, n))
#undef PyObject_GC_New
#define PyObject_GC_New(type, typeobj) (fails_now() ? (type *)PyErr_NoMemory() : (type *)_PyObject_GC_New(typeobj))
#undef PyMem_Malloc
#define PyMem_Malloc(n) (fails_now() ? NULL : (PyMem_Malloc)(n))
#undef PyMem_Calloc
#define PyMem_Calloc(n, size) (fails_now() ? NULL : (PyMem_Calloc)(n, size))
#undef PyMem_Realloc
#define PyMem_Realloc(p, n) (fails_now() ? NULL : (PyMem_Realloc)(p, n))

#define PyTuple_New(n) (fails_now() ? PyErr_NoMemory() : (PyTuple_New)(n))
#define PyTuple_Pack(...) (fails_now() ? PyErr_NoMemory() : (PyTuple_Pack)(__VA_ARGS__))
#define PyTuple_GetSlice(...) (fails_now() ? PyErr_NoMemory() : (PyTuple_GetSlice)(__VA_ARGS__))
#define PyList_New(n) (fails_now() ? PyErr_NoMemory() : (PyList_New)(n))
#define PyList_Append(list, item) (fails_now() ? (PyErr_NoMemory(), -1) : (PyList_Append)(list, item))
#define PyDict_New() (fails_now() ? PyErr_NoMemory() : (PyDict_New)())
#define PyDict_SetItem(...) (fails_now() ? (PyErr_NoMemory(), -1) : (PyDict_SetItem)(__VA_ARGS__))
#define PySet_New(...) (fails_now() ? PyErr_NoMemory() : (PySet_New)(__VA_ARGS__))
#define PySet_Contains(...) (fails_now() ? (PyErr_NoMemory(), -1) : (PySet_Contains)(__VA_ARGS__))
#define PyLong_FromLong(n) (fails_now() ? PyErr_NoMemory() : (PyLong_FromLong)(n))
#define PyLong_FromLongLong(n) (fails_now() ? PyErr_NoMemory() : (PyLong_FromLongLong)(n))
#define PyLong_FromUnsignedLong(n) (fails_now() ? PyErr_NoMemory() : (PyLong_FromUnsignedLong)(n))
#define PyLong_FromVoidPtr(p) (fails_now() ? PyErr_NoMemory() : (PyLong_FromVoidPtr)(p))
#define PyBytes_FromStringAndSize(...) (fails_now() ? PyErr_NoMemory() : (PyBytes_FromStringAndSize)(__VA_ARGS__))
#undef Py_BuildValue
#define Py_BuildValue(...) (fails_now() ? PyErr_NoMemory() : _Py_BuildValue_SizeT(__VA_ARGS__))
#undef Py_VaBuildValue
#define Py_VaBuildValue(...) (fails_now() ? PyErr_NoMemory() : _Py_VaBuildValue_SizeT(__VA_ARGS__))
#define PyWeakref_NewRef(...) (fails_now() ? PyErr_NoMemory() : (PyWeakref_NewRef)(__VA_ARGS__))
#define PyMethod_New(...) (fails_now() ? PyErr_NoMemory() : (PyMethod_New)(__VA_ARGS__))
#define PySequence_Fast(...) (fails_now() ? PyErr_NoMemory() : (PySequence_Fast)(__VA_ARGS__))
#define PySequence_Tuple(...) (fails_now() ? PyErr_NoMemory() : (PySequence_Tuple)(__VA_ARGS__))
#define PyObject_GetAttr(...) (fails_now() ? PyErr_NoMemory() : (PyObject_GetAttr)(__VA_ARGS__))
#define PyObject_GetItem(...) (fails_now() ? PyErr_NoMemory() : (PyObject_GetItem)(__VA_ARGS__))
#define PyObject_CallFunctionObjArgs(...) (fails_now() ? PyErr_NoMemory() : (PyObject_CallFunctionObjArgs)(__VA_ARGS__))
#define PyObject_CallObject(...) (fails_now() ? PyErr_NoMemory() : (PyObject_CallObject)(__VA_ARGS__))
#define PyUnicode_Tailmatch(...) (fails_now() ? (PyErr_NoMemory(), (Py_ssize_t)-1) : (PyUnicode_Tailmatch)(__VA_ARGS__))
