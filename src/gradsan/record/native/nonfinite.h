/* Search for NaN and Inf in the memory of tensors, without an operator of torch. Part of _native.c, which includes it once: one unit to compile. */

enum seen { FINITE, NONFINITE, UNSEEN, ELSEWHERE };

enum { ANY_NUMBER_OF_ELEMENTS = -1, LARGEST_LOSS = 4096, DTYPES = 6 };

/* Dtypes that can hold NaN and Inf: the kind for finite.c, the numbers per element, their bytes. */
static const struct {
    const char *name;
    int kind, numbers, bytes;
} dtype_facts[DTYPES] = {
    {"float32", 0, 1, 4},  {"float64", 1, 1, 8},   {"float16", 2, 1, 2},
    {"bfloat16", 3, 1, 2}, {"complex64", 0, 2, 4}, {"complex128", 1, 2, 8},
};

static PyObject *dtypes[DTYPES], *strided, *storage_bytes;

static int find_dtypes(void)
{
    if (strided != NULL)
        return 0;
    for (int i = 0; i < DTYPES; i++)
        if (dtypes[i] == NULL && (dtypes[i] = attribute_of_module("torch", dtype_facts[i].name)) == NULL)
            return -1;
    if (storage_bytes == NULL && (storage_bytes = PyObject_GetAttrString((PyObject *)torch.storage, "nbytes")) == NULL)
        return -1;
    return (strided = attribute_of_module("torch", "strided")) == NULL ? -1 : 0;
}

/* The dtype's index in `dtype_facts`; DTYPES for numbers that are always finite, -1 with an exception. */
static int dtype_of(PyObject *tensor)
{
    PyObject *dtype = attribute(tensor, DTYPE);
    int found = 0;
    if (dtype == NULL)
        return -1;
    while (found < DTYPES && dtypes[found] != dtype)
        found++;
    Py_DECREF(dtype);
    return found;
}

/* Whether the dtype's numbers at `memory` hold NaN or Inf. */
static enum seen search_memory(const char *memory, long long elements, int dtype)
{
    long long count = elements * dtype_facts[dtype].numbers;
    return first_nonfinite_number(memory, count, dtype_facts[dtype].kind) < 0 ? FINITE : NONFINITE;
}

/* The address of a tensor's elements; NULL if there are none, perhaps with an exception. */
static const char *address_of(PyObject *tensor)
{
    PyObject *pointer = method(tensor, CONST_DATA_PTR);
    const char *memory = pointer == NULL ? NULL : PyLong_AsVoidPtr(pointer);
    Py_XDECREF(pointer);
    return memory;
}

/* A zero-dimensional tensor, such as a loss: with as few reads as possible, because this runs at every backward. */
static enum seen look_at_scalar(PyObject *tensor, int dtype)
{
    const char *memory = address_of(tensor);
    /* Without an offset the address is unknown for an empty storage. */
    if (memory == NULL || integer(method(tensor, STORAGE_OFFSET)) != 0)
        return UNSEEN;
    return search_memory(memory, 1, dtype);
}

static enum seen look_at_elements(PyObject *tensor, int dtype, long long most)
{
    PyObject *layout = attribute(tensor, LAYOUT);
    Py_XDECREF(layout);
    if (layout != strided || truth(method(tensor, IS_CONTIGUOUS)) != 1)
        return UNSEEN;
    long long count = integer(method(tensor, NUMEL));
    if (count <= 0 || (most != ANY_NUMBER_OF_ELEMENTS && count > most))
        return count == 0 ? FINITE : UNSEEN;
    const char *memory = address_of(tensor);
    long long offset = memory == NULL ? -1 : integer(method(tensor, STORAGE_OFFSET));
    if (offset < 0)
        return UNSEEN;
    /* A program may have shrunk the storage below the size of its tensors. */
    PyObject *storage = method(tensor, UNTYPED_STORAGE);
    long long there = storage == NULL ? -1 : integer(PyObject_CallOneArg(storage_bytes, storage));
    Py_XDECREF(storage);
    if (there < (offset + count) * dtype_facts[dtype].numbers * dtype_facts[dtype].bytes)
        return UNSEEN;
    return search_memory(memory, count, dtype);
}

/* The same for a plain tensor while no mode is active; an exception may be set if it is UNSEEN. */
static enum seen look_at_plain(PyObject *tensor, long long most)
{
    int on_cpu = truth(attribute(tensor, IS_CPU));
    if (on_cpu != 1)
        return on_cpu == 0 ? ELSEWHERE : UNSEEN;
    int dtype = dtype_of(tensor);
    if (dtype < 0 || dtype == DTYPES)
        return dtype < 0 ? UNSEEN : FINITE;
    PyObject *shape = attribute(tensor, SHAPE);
    int is_scalar = shape != NULL && PyTuple_Check(shape) && PyTuple_GET_SIZE(shape) == 0;
    Py_XDECREF(shape);
    enum seen found = is_scalar ? look_at_scalar(tensor, dtype) : UNSEEN;
    return found != UNSEEN || PyErr_Occurred() ? found : look_at_elements(tensor, dtype, most);
}

/* Whether a tensor of at most `most` elements holds NaN or Inf. UNSEEN: it cannot be searched this way. Raises nothing. */
static enum seen look_for_nonfinite(PyObject *tensor, long long most)
{
    if (!is_plain(tensor))
        return UNSEEN;
    /* Modes, and a trace of torch.jit, would notice these reads. */
    int listens = truth(PyObject_Vectorcall(torch.has_function_modes, NULL, 0, NULL));
    if (listens == 0)
        listens = truth(PyObject_Vectorcall(torch.is_tracing, NULL, 0, NULL));
    enum seen found = listens == 0 ? look_at_plain(tensor, most) : UNSEEN;
    if (found == UNSEEN)
        PyErr_Clear();
    return found;
}

static PyObject *holds_nonfinite(PyObject *Py_UNUSED(module), PyObject *tensor)
{
    if (find_torch() < 0 || find_dtypes() < 0)
        return NULL;
    switch (look_for_nonfinite(tensor, ANY_NUMBER_OF_ELEMENTS)) {
    case FINITE:
        Py_RETURN_FALSE;
    case NONFINITE:
        Py_RETURN_TRUE;
    default:
        Py_RETURN_NONE;
    }
}

/* Whether an output of a backward is known to be finite, or is irrelevant. */
static int starts_finite(PyObject *outputs)
{
    if (!PyTuple_CheckExact(outputs))
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(outputs); i++) {
        PyObject *output = PyTuple_GET_ITEM(outputs, i);
        enum seen found = is_plain(output) ? look_for_nonfinite(output, LARGEST_LOSS) : ELSEWHERE;
        if (found != FINITE && found != ELSEWHERE)
            return 0;
    }
    return 1;
}
