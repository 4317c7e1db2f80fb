/* Logged calls of tensor[index], through the type's slot. Part of _native.c, which includes it once: one unit to compile. */

/* ---- indexing --------------------------------------------------------------------------------------------------- */

/* The C function behind `tensor[index]`, and the core that logs its calls; NULL while nobody watches. */
static binaryfunc indexing_original;
static Core *indexing_core;

/* Calls `on_result` for an indexing; -1: the exception must reach the program. */
static int notify_indexed(Core *core, PyObject *tensor, PyObject *key, PyObject *result)
{
    if (!is_set(core->on_result))
        return 0;
    PyObject *name = PyUnicode_InternFromString("__getitem__"), *args[] = {tensor, key};
    int failed = name == NULL || notify_call(core->on_result, name, args, 2, NULL, result) < 0;
    Py_XDECREF(name);
    return failed ? forgive(core) : 0;
}

/* Replaces mp_subscript of torch.Tensor and of the classes that inherit it. Setting the attribute __getitem__ instead
 * would make every tensor a sequence (patches.py). */
static PyObject *logged_subscript(PyObject *self, PyObject *key)
{
    if (indexing_core == NULL || !indexing_core->active)
        return indexing_original(self, key);
    /* The called code may switch watching off. */
    Core *core = (Core *)Py_NewRef((PyObject *)indexing_core);
    PyObject *result = NULL;
    int is_active = is_logged(core);
    if (is_active >= 0) {
        long long first = is_active ? sequence_here() : 0;
        result = indexing_original(self, key);
        if (result != NULL && is_active && core->active &&
            (notify_nodes(core, first, result) < 0 || notify_indexed(core, self, key, result) < 0))
            Py_CLEAR(result);
    }
    Py_DECREF(core);
    return result;
}

/* Replaces one function by another in mp_subscript of a type and of all its subclasses; -1 with an exception. */
static int replace_subscript(PyTypeObject *type, binaryfunc from, binaryfunc to)
{
    if (type->tp_as_mapping != NULL && type->tp_as_mapping->mp_subscript == from &&
        PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE))
        type->tp_as_mapping->mp_subscript = to;
    PyObject *below = PyObject_CallMethod((PyObject *)&PyType_Type, "__subclasses__", "O", type);
    int done = below == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; done == 0 && i < PyList_GET_SIZE(below); i++)
        if (PyType_Check(PyList_GET_ITEM(below, i)))
            done = replace_subscript((PyTypeObject *)PyList_GET_ITEM(below, i), from, to);
    Py_XDECREF(below);
    return done;
}

/* The C function behind torch.Tensor.__getitem__, NULL if something else is there. */
static binaryfunc find_subscript(void)
{
    PyObject *found = PyObject_GetAttrString((PyObject *)torch.tensor, "__getitem__");
    PyWrapperDescrObject *wrapper = (PyWrapperDescrObject *)found;
    binaryfunc subscript = NULL;
    if (found == NULL)
        PyErr_Clear();
    else if (Py_IS_TYPE(found, &PyWrapperDescr_Type) && PyType_IsSubtype(torch.tensor, PyDescr_TYPE(wrapper))) {
        PyMappingMethods *mapping = PyDescr_TYPE(wrapper)->tp_as_mapping;
        if (mapping != NULL && (void *)mapping->mp_subscript == wrapper->d_wrapped)
            subscript = mapping->mp_subscript;
    }
    Py_XDECREF(found);
    return subscript;
}

static PyObject *Core_watch_indexing(Core *self, PyObject *given)
{
    int wanted = PyObject_IsTrue(given);
    if (wanted < 0)
        return NULL;
    if (wanted && indexing_core == NULL) {
        if (indexing_original == NULL)
            indexing_original = find_subscript();
        if (indexing_original == NULL)
            Py_RETURN_NONE;
        indexing_core = (Core *)Py_NewRef((PyObject *)self);
        if (replace_subscript(torch.tensor, indexing_original, logged_subscript) < 0)
            return NULL;
    } else if (!wanted && indexing_core == self) {
        indexing_core = NULL;
        Py_DECREF(self);
        if (replace_subscript(torch.tensor, logged_subscript, indexing_original) < 0)
            return NULL;
    }
    Py_RETURN_NONE;
}
