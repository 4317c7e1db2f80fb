/* The live objects of given classes. Part of _native.c, which includes it once: one unit to compile. */

/* ---- a walk of the heap ------------------------------------------------------------------------------------------- */

static int by_address(const void *one, const void *other)
{
    uintptr_t a = (uintptr_t)*(void *const *)one, b = (uintptr_t)*(void *const *)other;
    return (a > b) - (a < b);
}

/* No other thread runs before the list of all objects is freed: the caller keeps the collector from running. Classes
 * are compared by address, as their hash and equality may be code of the program's. */
static PyObject *objects_of(PyObject *Py_UNUSED(module), PyObject *kinds)
{
    PyObject *wanted = PySequence_Tuple(kinds), *all = NULL, *found = NULL, *collector = NULL;
    Py_ssize_t count = wanted == NULL ? 0 : PyTuple_GET_SIZE(wanted);
    PyObject **sorted = wanted == NULL ? NULL : PyMem_New(PyObject *, count ? count : 1);
    if (wanted != NULL && sorted == NULL)
        PyErr_NoMemory();
    if (sorted == NULL || (found = PyList_New(0)) == NULL || (collector = PyImport_ImportModule("gc")) == NULL)
        goto end;
    for (Py_ssize_t i = 0; i < count; i++)
        sorted[i] = PyTuple_GET_ITEM(wanted, i);
    qsort(sorted, (size_t)count, sizeof *sorted, by_address);
    all = PyObject_CallMethod(collector, "get_objects", NULL);
    for (Py_ssize_t i = 0; all != NULL && i < PyList_GET_SIZE(all); i++) {
        PyObject *one = PyList_GET_ITEM(all, i), *kind = (PyObject *)Py_TYPE(one);
        if (bsearch(&kind, sorted, (size_t)count, sizeof *sorted, by_address) != NULL && PyList_Append(found, one) < 0) {
            Py_CLEAR(all);
            break;
        }
    }
end:
    if (all == NULL)
        Py_CLEAR(found);
    Py_XDECREF(all);
    Py_XDECREF(collector);
    Py_XDECREF(wanted);
    PyMem_Free(sorted);
    return found;
}
