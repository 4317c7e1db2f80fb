/* Memory lent to kernels as DLPack capsules. Part of _native.c, which includes it once: one unit to compile. */

/* ---- memory lent to kernels ------------------------------------------------------------------------------------- */

/* DLPack's managed tensor: the layout is that of its ABI, which torch reads. */
typedef struct Lent {
    void *data;
    struct { int32_t type, id; } device;
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
    void *owner;
    void (*give_back)(struct Lent *);
    int64_t sizes[]; /* shape, then strides */
} Lent;

enum { DEVICE_CPU = 1, COMPLEX = 5 };

static void Lent_give_back(Lent *lent)
{
    if (Py_IsInitialized()) {
        PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF((PyObject *)lent->owner);
        PyGILState_Release(state);
    }
    free(lent);
}

static void capsule_gone(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor")) /* not consumed yet */
        Lent_give_back((Lent *)PyCapsule_GetPointer(capsule, "dltensor"));
}

static int read_sizes(PyObject *tuple, Py_ssize_t count, int64_t *into)
{
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != count) {
        PyErr_SetString(PyExc_TypeError, "expected one size and one stride for each dimension");
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        into[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
        if (into[i] == -1 && PyErr_Occurred())
            return -1;
    }
    return 0;
}

static PyObject *capsule_over(void *data, PyObject *shape, PyObject *strides, long code, long bits, PyObject *owner)
{
    Py_ssize_t ndim = PyTuple_Check(shape) ? PyTuple_GET_SIZE(shape) : 0;
    Lent *lent = (Lent *)calloc(1, sizeof(Lent) + 2 * (size_t)ndim * sizeof(int64_t));
    if (lent == NULL)
        return PyErr_NoMemory();
    lent->data = data;
    lent->device.type = DEVICE_CPU;
    lent->ndim = (int32_t)ndim;
    lent->shape = lent->sizes;
    lent->strides = lent->sizes + ndim;
    lent->dtype.code = (uint8_t)code;
    lent->dtype.bits = (uint8_t)bits;
    lent->dtype.lanes = 1;
    lent->give_back = Lent_give_back;
    if (read_sizes(shape, ndim, lent->shape) < 0 || read_sizes(strides, ndim, lent->strides) < 0) {
        free(lent);
        return NULL;
    }
    lent->owner = Py_NewRef(owner);
    PyObject *capsule = PyCapsule_New(lent, "dltensor", capsule_gone);
    if (capsule == NULL)
        Lent_give_back(lent);
    return capsule;
}

static PyObject *lend(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 6) {
        PyErr_SetString(PyExc_TypeError, "lend() takes an address, shape, strides, code, bits and owner");
        return NULL;
    }
    void *data = PyLong_AsVoidPtr(args[0]);
    long code = PyLong_AsLong(args[3]), bits = PyLong_AsLong(args[4]);
    return PyErr_Occurred() ? NULL : capsule_over(data, args[1], args[2], code, bits, args[5]);
}
