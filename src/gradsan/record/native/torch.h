/* Tensors and Nodes through torch's Python interface: descriptors, versions, storages. Part of _native.c, which includes it once: one unit to compile. */

/* ---- torch, as Python shows it ---------------------------------------------------------------------------------- */

enum { VERSION, IS_LEAF, REQUIRES_GRAD, BASE, SHAPE, DTYPE, LAYOUT, IS_CPU, ATTRIBUTES };
enum { UNTYPED_STORAGE, STORAGE_OFFSET, STRIDE, ELEMENT_SIZE, NUMEL, IS_CONTIGUOUS, CONST_DATA_PTR, METHODS };

static const char *const attribute_texts[ATTRIBUTES] = {"_version", "is_leaf", "requires_grad", "_base",
                                                    "shape",    "dtype",   "layout",        "is_cpu"};
static const char *const method_texts[METHODS] = {"untyped_storage", "storage_offset", "stride", "element_size",
                                               "numel", "is_contiguous", "const_data_ptr"};

/* Filled by the first Core and kept for the life of the process. */
static struct {
    int ready;
    PyTypeObject *tensor, *parameter; /* types whose members may be read by descriptor; parameter NULL: it overrides */
    PyTypeObject *storage;
    PyObject *attribute_names[ATTRIBUTES], *method_names[METHODS], *cdata_name;
    PyGetSetDef *attributes[ATTRIBUTES], *cdata; /* NULL: not the expected kind of descriptor, read by attribute */
    PyObject *methods[METHODS];                  /* NULL: as above */
    PyObject *sequence_number, *is_grad_enabled, *weak_identity, *dress, *marks_of, *own_names;
    PyObject *optimizer_folder, *reduction, *is_of_signal;
    PyObject *has_function_modes, *is_tracing, *hush, *unhush, *function_state, *put_modes_back;
    uint64_t (*peek_sequence)(void); /* the C++ function behind `sequence_number`; NULL: it was not found */
} torch;

/* The C getter behind `type.name`, NULL without an exception if there is none. The type keeps the descriptor alive. */
static PyGetSetDef *getter_of(PyTypeObject *type, PyObject *name)
{
    PyObject *found = PyObject_GetAttr((PyObject *)type, name);
    PyGetSetDef *getter = NULL;
    if (found == NULL)
        PyErr_Clear();
    else if (Py_IS_TYPE(found, &PyGetSetDescr_Type) && PyType_IsSubtype(type, ((PyDescrObject *)found)->d_type))
        getter = ((PyGetSetDescrObject *)found)->d_getset;
    Py_XDECREF(found);
    return getter != NULL && getter->get != NULL ? getter : NULL;
}

static PyObject *method_of(PyTypeObject *type, PyObject *name)
{
    PyObject *found = PyObject_GetAttr((PyObject *)type, name);
    if (found == NULL)
        PyErr_Clear();
    else if (!Py_IS_TYPE(found, &PyMethodDescr_Type))
        Py_CLEAR(found);
    return found;
}

static PyObject *attribute_of_module(const char *module_name, const char *name)
{
    PyObject *module = PyImport_ImportModule(module_name);
    PyObject *found = module == NULL ? NULL : PyObject_GetAttrString(module, name);
    Py_XDECREF(module);
    return found;
}

static PyTypeObject *type_of_module(const char *module_name, const char *name)
{
    PyObject *found = attribute_of_module(module_name, name);
    if (found != NULL && !PyType_Check(found)) {
        PyErr_Format(PyExc_TypeError, "%s.%s is not a class", module_name, name);
        Py_CLEAR(found);
    }
    return (PyTypeObject *)found;
}

static PyTypeObject MethodWriter_Type, FunctionWriter_Type;

/* Makes `__call__`, read from the wrapper types, the function that a compiler can trace; calls still use tp_call.
 * torch.compile looks it up for a called object, and a C slot would cause a graph break. */
static int let_compilers_trace(void)
{
    PyObject *call = attribute_of_module("gradsan.record._writer_pure", "traced_call");
    PyTypeObject *types[] = {&MethodWriter_Type, &FunctionWriter_Type};
    int status = call == NULL ? -1 : 0;
    for (int i = 0; status == 0 && i < 2; i++) {
        status = PyDict_SetItemString(types[i]->tp_dict, "__call__", call);
        PyType_Modified(types[i]);
    }
    Py_XDECREF(call);
    return status;
}

static int find_torch(void)
{
    static const char here[] = "gradsan._torch";
    if (torch.ready)
        return 0;
    if ((torch.tensor = type_of_module("torch", "Tensor")) == NULL ||
        (torch.parameter = type_of_module("torch.nn", "Parameter")) == NULL ||
        (torch.storage = type_of_module("torch", "UntypedStorage")) == NULL ||
        (torch.sequence_number = attribute_of_module(here, "sequence_number")) == NULL ||
        (torch.is_grad_enabled = attribute_of_module(here, "is_grad_enabled")) == NULL ||
        (torch.weak_identity = attribute_of_module(here, "weak_identity")) == NULL ||
        (torch.dress = attribute_of_module(here, "dress")) == NULL ||
        (torch.marks_of = attribute_of_module(here, "marks_of")) == NULL ||
        (torch.own_names = attribute_of_module("gradsan.record._writer_pure", "OWN_NAMES")) == NULL ||
        (torch.optimizer_folder = attribute_of_module(here, "optimizer_folder")) == NULL ||
        (torch.reduction = attribute_of_module("gradsan.record._writer_pure", "reduction")) == NULL ||
        (torch.is_of_signal = attribute_of_module("gradsan.record._writer_pure", "is_of_signal")) == NULL ||
        (torch.has_function_modes = attribute_of_module(here, "has_function_modes")) == NULL ||
        (torch.is_tracing = attribute_of_module(here, "is_tracing")) == NULL ||
        (torch.hush = attribute_of_module(here, "hush")) == NULL ||
        (torch.unhush = attribute_of_module(here, "unhush")) == NULL ||
        (torch.function_state = attribute_of_module(here, "function_state")) == NULL ||
        (torch.put_modes_back = attribute_of_module(here, "put_modes_back")) == NULL ||
        (torch.cdata_name = PyUnicode_InternFromString("_cdata")) == NULL || let_compilers_trace() < 0)
        return -1;
    for (int i = 0; i < ATTRIBUTES; i++) {
        if ((torch.attribute_names[i] = PyUnicode_InternFromString(attribute_texts[i])) == NULL)
            return -1;
        torch.attributes[i] = getter_of(torch.tensor, torch.attribute_names[i]);
        if (getter_of(torch.parameter, torch.attribute_names[i]) != torch.attributes[i])
            torch.parameter = torch.tensor;
    }
    for (int i = 0; i < METHODS; i++) {
        if ((torch.method_names[i] = PyUnicode_InternFromString(method_texts[i])) == NULL)
            return -1;
        torch.methods[i] = method_of(torch.tensor, torch.method_names[i]);
        PyObject *overriding = method_of(torch.parameter, torch.method_names[i]);
        if (overriding != torch.methods[i])
            torch.parameter = torch.tensor;
        Py_XDECREF(overriding);
    }
    torch.cdata = getter_of(torch.storage, torch.cdata_name);
    PyObject *find = attribute_of_module(here, "sequence_number_address");
    PyObject *address = find == NULL ? NULL : PyObject_CallNoArgs(find);
    Py_XDECREF(find);
    void *found = address == NULL ? NULL : PyLong_AsVoidPtr(address);
    Py_XDECREF(address);
    if (PyErr_Occurred())
        return -1;
    memcpy(&torch.peek_sequence, &found, sizeof found);
    torch.ready = 1;
    return 0;
}

/* Whether the type is known to override nothing, so that its members may be read by descriptor. */
static inline int is_plain(PyObject *tensor)
{
    return Py_IS_TYPE(tensor, torch.tensor) || Py_IS_TYPE(tensor, torch.parameter);
}

static inline PyObject *attribute(PyObject *tensor, int which)
{
    PyGetSetDef *getter = torch.attributes[which];
    if (getter != NULL && is_plain(tensor))
        return getter->get(tensor, getter->closure);
    return PyObject_GetAttr(tensor, torch.attribute_names[which]);
}

static inline PyObject *method(PyObject *tensor, int which)
{
    PyObject *descriptor = torch.methods[which];
    if (descriptor != NULL && is_plain(tensor))
        return PyObject_Vectorcall(descriptor, &tensor, 1, NULL);
    return PyObject_CallMethodNoArgs(tensor, torch.method_names[which]);
}

/* The truth of a value (steals the reference); -1 with an exception, also if the value is NULL. */
static inline int truth(PyObject *given)
{
    if (given == NULL)
        return -1;
    int found = given == Py_True ? 1 : given == Py_False ? 0 : PyObject_IsTrue(given);
    Py_DECREF(given);
    return found;
}

/* The integer of a value (steals the reference); -1 with an exception, also if the value is NULL. */
static inline long long integer(PyObject *given)
{
    if (given == NULL)
        return -1;
    long long found = PyLong_AsLongLong(given);
    Py_DECREF(given);
    return found;
}

/* Disables the program's own __torch_function__, of modes and of subclasses, for reads of tensors. The result goes to
 * `unhush`; NULL if there is none. `tensor` may be NULL: then only modes count. Raises nothing. */
static PyObject *hush(PyObject *tensor)
{
    int listens = tensor != NULL && !is_plain(tensor);
    if (!listens)
        listens = truth(PyObject_Vectorcall(torch.has_function_modes, NULL, 0, NULL));
    PyObject *before = listens > 0 ? PyObject_Vectorcall(torch.hush, NULL, 0, NULL) : NULL;
    if (before == NULL && listens != 0)
        PyErr_Clear();
    return before;
}

/* Undoes `hush`; a set exception is kept. */
static void unhush(PyObject *before)
{
    if (before == NULL)
        return;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *done = PyObject_CallOneArg(torch.unhush, before);
    if (done == NULL)
        PyErr_Clear();
    Py_XDECREF(done);
    Py_DECREF(before);
    PyErr_Restore(type, value, traceback);
}

static PyObject *storage_identity(PyObject *tensor)
{
    PyObject *storage = method(tensor, UNTYPED_STORAGE);
    if (storage == NULL)
        return NULL;
    PyObject *found = torch.cdata != NULL && Py_IS_TYPE(storage, torch.storage)
                          ? torch.cdata->get(storage, torch.cdata->closure)
                          : PyObject_GetAttr(storage, torch.cdata_name);
    Py_DECREF(storage);
    return found;
}

static int is_tensor(PyObject *object)
{
    return PyObject_TypeCheck(object, torch.tensor) ? 1 : PyObject_IsInstance(object, (PyObject *)torch.tensor);
}
