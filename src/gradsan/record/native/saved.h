/* Saved tensors that deep mode keeps: their fields, the live ones, and the hooks that pack and unpack ordinary ones.
 * originals.py and deep.py are the specification, and do the rest. Part of _native.c, which includes it once: one unit
 * to compile. */

/* ---- a kept value ----------------------------------------------------------------------------------------------- */

struct SavedValues;

typedef struct SavedFields {
    PyObject_HEAD
    PyObject *weak_references;
    struct SavedFields *previous, *next; /* among the live values, oldest first */
    struct SavedValues *values;          /* NULL: it is not among them */
    PyObject *alias, *original, *parts, *heals, *hooks, *leaf, *maker, *output, *source, *stack;
    long long clock, same_at, version;
    unsigned long thread;
    int reported, code, bits; /* the latter two as in DLPack, for an ordinary value; else 0 */
    char *place;              /* the address of its first element at the save */
    char is_copied, requires_grad, was_leaf;
} SavedFields;

/* The live values, and the settings of the two hooks. */
typedef struct SavedValues {
    PyObject_HEAD
    Core *core;
    PyTypeObject *kind; /* the class of the values, a subclass of SavedFields without fields of its own */
    PyObject *slow_pack, *slow_unpack;
    PyObject *exempt;  /* a tuple of sets and dicts: storages left to slow_pack */
    PyObject *readers; /* a tuple of sets and dicts: while one is not empty, slow_unpack is called */
    PyObject *on_kept; /* called with each value that was kept here; it may raise */
    char is_off;       /* slow_pack and slow_unpack are always called */
    SavedFields *first, *last;
    Py_ssize_t count;
} SavedValues;

static void unlink_value(SavedFields *value)
{
    SavedValues *values = value->values;
    if (values == NULL)
        return;
    *(value->previous != NULL ? &value->previous->next : &values->first) = value->next;
    *(value->next != NULL ? &value->next->previous : &values->last) = value->previous;
    values->count--;
    value->values = NULL;
    value->previous = value->next = NULL;
}

static void link_value(SavedValues *values, SavedFields *value)
{
    unlink_value(value);
    value->values = values;
    value->previous = values->last;
    *(values->last != NULL ? &values->last->next : &values->first) = value;
    values->last = value;
    values->count++;
}

static void SavedFields_dealloc(SavedFields *self)
{
    unlink_value(self);
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    PyObject *held[] = {self->alias, self->original, self->parts,  self->heals,  self->hooks,
                        self->leaf,  self->maker,    self->output, self->source, self->stack};
    Py_TYPE(self)->tp_free((PyObject *)self);
    for (size_t i = 0; i < sizeof held / sizeof *held; i++)
        Py_XDECREF(held[i]);
}

static PyMemberDef SavedFields_members[] = {
    {"_leaf", T_OBJECT, offsetof(SavedFields, leaf), 0, NULL},
    {"alias", T_OBJECT, offsetof(SavedFields, alias), 0, NULL},
    {"clock", T_LONGLONG, offsetof(SavedFields, clock), 0, NULL},
    {"heals", T_OBJECT, offsetof(SavedFields, heals), 0, NULL},
    {"hooks", T_OBJECT, offsetof(SavedFields, hooks), 0, NULL},
    {"is_copied", T_BOOL, offsetof(SavedFields, is_copied), 0, NULL},
    {"maker", T_OBJECT, offsetof(SavedFields, maker), 0, NULL},
    {"original", T_OBJECT, offsetof(SavedFields, original), 0, NULL},
    {"output", T_OBJECT, offsetof(SavedFields, output), 0, NULL},
    {"parts", T_OBJECT, offsetof(SavedFields, parts), 0, NULL},
    {"reported", T_INT, offsetof(SavedFields, reported), 0, NULL},
    {"requires_grad", T_BOOL, offsetof(SavedFields, requires_grad), 0, NULL},
    {"same_at", T_LONGLONG, offsetof(SavedFields, same_at), 0, NULL},
    {"source", T_OBJECT, offsetof(SavedFields, source), 0, NULL},
    {"stack", T_OBJECT, offsetof(SavedFields, stack), 0, NULL},
    {"thread", T_ULONG, offsetof(SavedFields, thread), 0, NULL},
    {"version", T_LONGLONG, offsetof(SavedFields, version), 0, NULL},
    {"was_leaf", T_BOOL, offsetof(SavedFields, was_leaf), 0, NULL},
    {NULL},
};

/* Not tracked by the garbage collector, for which it would be one more object per saved tensor: like everything that a
 * graph holds beside its Nodes, a cycle through it goes through torch, where the collector does not see it, either. */
static PyTypeObject SavedFields_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "gradsan.record._native.SavedFields",
    .tp_doc = "The fields of a saved tensor that deep mode keeps.",
    .tp_basicsize = sizeof(SavedFields),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)SavedFields_dealloc,
    .tp_weaklistoffset = offsetof(SavedFields, weak_references),
    .tp_members = SavedFields_members,
};

/* ---- torch, as it is asked for a value that is saved ------------------------------------------------------------- */

/* The functions of _torch.hooks.parts_of_saves(); filled by the first SavedValues. */
static struct {
    int state; /* 0: not read yet, 1: complete, -1: something is missing, and the Python hooks do everything */
    PyObject *address, *detach, *dispatch_depth, *dlpack_types, *from_dlpack, *function_node, *is_cow, *is_negated, *is_tracing,
        *lazy_clone, *lent_storages, *nbytes, *resizable, *weak_tensor;
    PyObject *grad_fn_name, *output_name, *sequence_name, *no_parts;
} saving;

static int find_parts_of_saves(void)
{
    if (saving.state != 0)
        return 0;
    PyObject *maker = attribute_of_module("gradsan._torch.hooks", "parts_of_saves");
    PyObject *parts = maker == NULL ? NULL : PyObject_CallNoArgs(maker);
    Py_XDECREF(maker);
    if (parts == NULL)
        return -1;
    if (parts == Py_None) {
        Py_DECREF(parts);
        saving.state = -1;
        return 0;
    }
    struct { const char *name; PyObject **place; } wanted[] = {
        {"address", &saving.address},
        {"detach", &saving.detach},
        {"dispatch_depth", &saving.dispatch_depth},
        {"dlpack_types", &saving.dlpack_types},
        {"from_dlpack", &saving.from_dlpack},
        {"function_node", &saving.function_node},
        {"is_cow", &saving.is_cow},
        {"is_negated", &saving.is_negated},
        {"is_tracing", &saving.is_tracing},
        {"lazy_clone", &saving.lazy_clone},
        {"lent_storages", &saving.lent_storages},
        {"nbytes", &saving.nbytes},
        {"resizable", &saving.resizable},
        {"weak_tensor", &saving.weak_tensor},
    };
    int found = PyDict_Check(parts) ? 0 : -1;
    for (size_t i = 0; found == 0 && i < sizeof wanted / sizeof *wanted; i++) {
        PyObject *part = PyDict_GetItemString(parts, wanted[i].name);
        if (part == NULL)
            found = -1;
        *wanted[i].place = Py_XNewRef(part);
    }
    Py_DECREF(parts);
    if (found < 0 || (saving.grad_fn_name = PyUnicode_InternFromString("grad_fn")) == NULL ||
        (saving.output_name = PyUnicode_InternFromString("output_nr")) == NULL ||
        (saving.sequence_name = PyUnicode_InternFromString("_sequence_nr")) == NULL ||
        (saving.no_parts = PyTuple_New(0)) == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "parts_of_saves() lacks a part");
        return -1;
    }
    saving.state = 1;
    return 0;
}

/* The truth of a C function's result for one object, -1 with an exception. */
static inline int says(PyObject *function, PyObject *object)
{
    return truth(PyObject_CallOneArg(function, object));
}

/* Whether a mode of either kind, or jit.trace, is active; true also if that is unknown. */
static int has_modes(void)
{
    int found = integer(PyObject_Vectorcall(saving.dispatch_depth, NULL, 0, NULL)) != 0 ||
                truth(PyObject_Vectorcall(torch.has_function_modes, NULL, 0, NULL)) != 0 ||
                truth(PyObject_Vectorcall(saving.is_tracing, NULL, 0, NULL)) != 0;
    PyErr_Clear();
    return found;
}

static int holds_any(PyObject *containers)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(containers); i++)
        if (PyObject_Size(PyTuple_GET_ITEM(containers, i)) != 0)
            return 1;
    return 0;
}

/* Whether one of the containers has the number of a storage, or it is lent memory; -1 with an exception. */
static int is_exempt(PyObject *containers, PyObject *tensor)
{
    if (!holds_any(containers) && PyObject_Size(saving.lent_storages) == 0)
        return 0;
    PyObject *number = storage_identity(tensor);
    int found = number == NULL ? -1 : PySequence_Contains(saving.lent_storages, number);
    for (Py_ssize_t i = 0; found == 0 && i < PyTuple_GET_SIZE(containers); i++)
        found = PySequence_Contains(PyTuple_GET_ITEM(containers, i), number);
    Py_XDECREF(number);
    return found;
}

/* The address of the first element of a tensor in ordinary memory; 0 for others, -1 with an exception. */
static inline long long address_here(PyObject *tensor)
{
    return integer(PyObject_CallOneArg(saving.address, tensor));
}

/* Whether a storage is torch's own, not foreign memory; -1 with an exception. */
static int is_resizable(PyObject *tensor)
{
    PyObject *storage = method(tensor, UNTYPED_STORAGE);
    int found = storage == NULL ? -1 : says(saving.resizable, storage);
    Py_XDECREF(storage);
    return found;
}

/* DLPack's type of a tensor's elements, if these are real numbers in CPU memory without lazy bits; otherwise 0, with or
 * without an exception. */
static int find_numbers(PyObject *tensor, SavedFields *kept)
{
    PyObject *dtype = attribute(tensor, DTYPE);
    PyObject *type = dtype == NULL ? NULL : PyDict_GetItemWithError(saving.dlpack_types, dtype);
    Py_XDECREF(dtype);
    if (type == NULL || truth(attribute(tensor, IS_CPU)) <= 0 || says(saving.is_negated, tensor) != 0)
        return 0;
    kept->code = (int)PyLong_AsLong(PyTuple_GET_ITEM(type, 0));
    kept->bits = (int)PyLong_AsLong(PyTuple_GET_ITEM(type, 1));
    return kept->code != COMPLEX && !PyErr_Occurred();
}

/* ---- the hooks ---------------------------------------------------------------------------------------------------- */

/* Fills the fields about a value's maker; 0 if that cannot be decided here, -1 with an exception. */
static int fill_origin(SavedFields *kept, PyObject *tensor)
{
    int flag = truth(attribute(tensor, IS_LEAF)), is_result = 0;
    kept->was_leaf = (char)flag;
    if (flag < 0 || (flag = truth(attribute(tensor, REQUIRES_GRAD))) < 0)
        return -1;
    kept->requires_grad = (char)flag;
    if (kept->was_leaf)
        kept->leaf = Py_NewRef(tensor);
    else {
        PyObject *node = PyObject_GetAttr(tensor, saving.grad_fn_name);
        if (node == NULL)
            return -1;
        const char *name = strrchr(Py_TYPE(node)->tp_name, '.');
        name = name == NULL ? Py_TYPE(node)->tp_name : name + 1;
        /* A custom Function, or a Node that hides its saves, may or may not be the one that saves. */
        int is_known = strcmp(name, "CopySlices") && strcmp(name, "CppFunction") &&
                       !PyType_IsSubtype(Py_TYPE(node), (PyTypeObject *)saving.function_node);
        if (is_known > 0) {
            kept->maker = PyObject_CallMethodNoArgs(node, saving.sequence_name);
            long long number = kept->maker == NULL ? -1 : PyLong_AsLongLong(kept->maker);
            is_known = PyErr_Occurred() ? -1 : 1;
            is_result = number == sequence_here() - 1;
        }
        Py_DECREF(node);
        if (is_known <= 0)
            return is_known;
    }
    if (is_result)
        return (kept->output = PyObject_GetAttr(tensor, saving.output_name)) == NULL ? -1 : 1;
    return (kept->source = PyObject_CallOneArg(saving.weak_tensor, tensor)) == NULL ? -1 : 1;
}

/* Keeps an ordinary value with its original; NULL, with or without an exception, if it is left to `slow_pack`. */
static SavedFields *keep_ordinary(SavedValues *self, PyObject *tensor)
{
    if (is_exempt(self->exempt, tensor) != 0 || is_resizable(tensor) <= 0)
        return NULL;
    SavedFields *kept = (SavedFields *)self->kind->tp_alloc(self->kind, 0);
    if (kept == NULL)
        return NULL;
    /* A tensor of inference mode has no version. */
    if (!find_numbers(tensor, kept) || fill_origin(kept, tensor) <= 0 ||
        (kept->alias = PyObject_CallOneArg(saving.detach, tensor)) == NULL ||
        ((kept->version = integer(attribute(kept->alias, VERSION))) == -1 && PyErr_Occurred()) ||
        (kept->original = PyObject_CallOneArg(saving.lazy_clone, kept->alias)) == NULL ||
        (kept->place = (char *)(intptr_t)address_here(kept->original)) == NULL ||
        address_here(kept->alias) != (intptr_t)kept->place || PyErr_Occurred() || (kept->stack = stack_here(self->core, 0)) == NULL ||
        Py_SIZE(kept->stack) == 0) { /* a thread of the engine makes Nodes for the call that is waiting */
        Py_DECREF(kept);
        return NULL;
    }
    kept->parts = Py_NewRef(saving.no_parts);
    /* No reference cycle can go through these two, and the collector would visit them again and again. */
    PyObject_GC_UnTrack(kept->alias);
    PyObject_GC_UnTrack(kept->original);
    kept->thread = PyThread_get_thread_ident();
    kept->same_at = -1;
    kept->clock = ++self->core->clock;
    link_value(self, kept);
    return kept;
}

/* The pack hook. */
static PyObject *SavedValues_pack(SavedValues *self, PyObject *tensor)
{
    SavedFields *kept = NULL;
    if (saving.state > 0 && self->core->active && !self->is_off && is_plain(tensor) && !has_modes()) {
        kept = keep_ordinary(self, tensor);
        if (kept == NULL)
            PyErr_Clear();
    }
    if (kept == NULL)
        return PyObject_CallOneArg(self->slow_pack, tensor);
    if (is_set(self->on_kept)) {
        PyObject *done = call_held(self->on_kept, "(O)", kept);
        if (done == NULL)
            Py_CLEAR(kept);
        Py_XDECREF(done);
    }
    return (PyObject *)kept;
}

/* The state of a value without comparing its bytes. */
typedef enum { UNKNOWN, MOVED, AS_SAVED } Look;

/* AS_SAVED: nobody has written it since it was saved. MOVED: its memory is not the saved one, for example because other
 * elements of its storage have been written. Whether its tensor was detached in place goes to `is_detached`. */
static Look look_at(SavedFields *kept, int *is_detached)
{
    if (kept->place == NULL || !is_plain(kept->alias) || !is_plain(kept->original) ||
        integer(attribute(kept->alias, VERSION)) != kept->version)
        return UNKNOWN;
    long long place = address_here(kept->alias);
    Look found = place == (intptr_t)kept->place ? AS_SAVED : place > 0 ? MOVED : UNKNOWN;
    if (is_set(kept->source)) {
        PyObject *source = PyObject_CallNoArgs(kept->source);
        if (source != NULL && source != Py_None) {
            if (!is_plain(source) || address_here(source) != place)
                found = UNKNOWN;
            *is_detached = !kept->was_leaf && truth(attribute(source, IS_LEAF)) != 0;
        }
        Py_XDECREF(source);
    }
    return PyErr_Occurred() ? UNKNOWN : found;
}

/* The elements of a kept value at `place`; NULL, with or without an exception, if they are left to `slow_unpack`.
 * `owner` is a lazy clone that holds the memory. */
static PyObject *lent_at(SavedFields *kept, char *place, PyObject *owner)
{
    if (truth(PyObject_Vectorcall(torch.is_grad_enabled, NULL, 0, NULL)) != 0)
        return NULL; /* graphs made within the backward may save lent memory */
    PyObject *shape = attribute(kept->alias, SHAPE), *strides = shape == NULL ? NULL : method(kept->alias, STRIDE);
    PyObject *capsule = strides == NULL ? NULL : capsule_over(place, shape, strides, kept->code, kept->bits, owner);
    PyObject *made = capsule == NULL ? NULL : PyObject_CallOneArg(saving.from_dlpack, capsule);
    Py_XDECREF(capsule);
    Py_XDECREF(strides);
    Py_XDECREF(shape);
    return made;
}

#define DIMENSIONS_COMPARED 8
#define ELEMENTS_COMPARED 65536

static int are_same_rows(const char *one, const char *other, const int64_t *sizes, const int64_t *steps, int dimensions)
{
    if (dimensions == 1)
        return !memcmp(one, other, (size_t)sizes[0]);
    for (int64_t i = 0; i < sizes[0]; i++)
        if (!are_same_rows(one + i * steps[0], other + i * steps[0], sizes + 1, steps + 1, dimensions - 1))
            return 0;
    return 1;
}

/* The size of the storage of a tensor in bytes; -1 with an exception. */
static long long storage_size(PyObject *tensor)
{
    PyObject *storage = method(tensor, UNTYPED_STORAGE);
    long long found = storage == NULL ? -1 : integer(PyObject_CallOneArg(saving.nbytes, storage));
    Py_XDECREF(storage);
    return found;
}

/* Whether the few elements of a moved value are equal in every bit; 0 also if they are not compared here. */
static int has_same_elements(SavedFields *kept)
{
    PyObject *alias = kept->alias;
    long long count = integer(method(alias, NUMEL)), size = storage_size(alias);
    if (count <= 0 || count > ELEMENTS_COMPARED || size <= 0 || size != storage_size(kept->original))
        return 0;
    PyObject *shape = attribute(alias, SHAPE), *strides = shape == NULL ? NULL : method(alias, STRIDE);
    int64_t sizes[DIMENSIONS_COMPARED + 1], steps[DIMENSIONS_COMPARED + 1], bytes = kept->bits / 8;
    Py_ssize_t dimensions = strides == NULL ? 0 : PyTuple_GET_SIZE(shape);
    int found = strides != NULL && dimensions <= DIMENSIONS_COMPARED && read_sizes(shape, dimensions, sizes) == 0 &&
                read_sizes(strides, dimensions, steps) == 0;
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    if (!found)
        return 0;
    for (Py_ssize_t i = 0; i < dimensions; i++)
        steps[i] *= bytes;
    /* The innermost row consists of bytes. */
    if (dimensions > 0 && (steps[dimensions - 1] == bytes || sizes[dimensions - 1] == 1))
        sizes[dimensions - 1] *= bytes;
    else
        sizes[dimensions++] = bytes;
    char *now = (char *)(intptr_t)address_here(alias);
    if (address_here(kept->original) != (intptr_t)kept->place)
        return 0; /* the memory at `place` may be gone */
    return !PyErr_Occurred() && now != NULL && are_same_rows(now, kept->place, sizes, steps, (int)dimensions);
}

/* Whether it is certain that a value is unchanged. Raises nothing. */
static Look is_unchanged(SavedFields *kept, int *is_detached)
{
    Look found = look_at(kept, is_detached);
    if (found == MOVED && !has_same_elements(kept))
        found = UNKNOWN;
    PyErr_Clear();
    return found;
}

/* The value for a kernel, if it has moved and is unchanged; NULL as for `lent_at`. */
static PyObject *given_where_it_is(SavedFields *kept)
{
    int is_shared = says(saving.is_cow, kept->alias);
    if (is_shared <= 0)
        return is_shared == 0 ? Py_NewRef(kept->alias) : NULL;
    PyObject *owner = PyObject_CallOneArg(saving.lazy_clone, kept->alias);
    long long place = owner == NULL ? -1 : address_here(owner);
    PyObject *lent = place <= 0 ? NULL : lent_at(kept, (char *)(intptr_t)place, owner);
    Py_XDECREF(owner);
    return lent;
}

/* The unpack hook. */
static PyObject *SavedValues_unpack(SavedValues *self, PyObject *packed)
{
    PyObject *given = NULL;
    if (saving.state > 0 && !self->is_off && Py_IS_TYPE(packed, self->kind) && PyList_GET_SIZE(self->core->running) > 0 &&
        !is_set(((SavedFields *)packed)->hooks) && !holds_any(self->readers) && !has_modes()) {
        SavedFields *kept = (SavedFields *)packed;
        int is_detached = 0;
        Look found = is_unchanged(kept, &is_detached);
        if (found != UNKNOWN && !is_detached &&
            (given = found == AS_SAVED ? lent_at(kept, kept->place, kept->original) : given_where_it_is(kept)) == NULL)
            PyErr_Clear();
    }
    return given != NULL ? given : PyObject_CallOneArg(self->slow_unpack, packed);
}

/* ---- the live values ---------------------------------------------------------------------------------------------- */

/* Values kept by the Python hook are checked here, too, if their elements lie like those of an ordinary value. */
static void find_place(SavedFields *kept)
{
    if (saving.state > 0 && !kept->is_copied && is_set(kept->original) && is_plain(kept->alias) && is_plain(kept->original) &&
        !has_modes() && find_numbers(kept->alias, kept)) {
        long long place = address_here(kept->original);
        if (place > 0 && place == address_here(kept->alias))
            kept->place = (char *)(intptr_t)place;
    }
    PyErr_Clear();
}

static PyObject *SavedValues_add(SavedValues *self, PyObject *value)
{
    if (!PyObject_TypeCheck(value, &SavedFields_Type))
        return PyErr_Format(PyExc_TypeError, "add() needs a kept value");
    find_place((SavedFields *)value);
    link_value(self, (SavedFields *)value);
    Py_RETURN_NONE;
}

static PyObject *SavedValues_live(SavedValues *self, PyObject *Py_UNUSED(ignored))
{
    PyObject *list = PyList_New(0);
    for (SavedFields *one = self->first; list != NULL && one != NULL; one = one->next)
        if (PyList_Append(list, (PyObject *)one) < 0)
            Py_CLEAR(list);
    return list;
}

static PyObject *SavedValues_doubtful(SavedValues *self, PyObject *Py_UNUSED(ignored))
{
    /* A value may die while another one is checked. */
    PyObject *all = SavedValues_live(self, NULL), *list = all == NULL ? NULL : PyList_New(0);
    for (Py_ssize_t i = 0; list != NULL && i < PyList_GET_SIZE(all); i++) {
        PyObject *one = PyList_GET_ITEM(all, i);
        int is_detached = 0;
        if (is_unchanged((SavedFields *)one, &is_detached) == UNKNOWN && PyList_Append(list, one) < 0)
            Py_CLEAR(list);
    }
    Py_XDECREF(all);
    return list;
}

static PyObject *SavedValues_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"core", "kind", "pack", "unpack", "exempt", "readers", NULL};
    PyObject *core, *kind, *pack, *unpack, *exempt, *readers;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!OOO!O!:SavedValues", names, &Core_Type, &core, &PyType_Type, &kind,
                                     &pack, &unpack, &PyTuple_Type, &exempt, &PyTuple_Type, &readers) ||
        find_parts_of_saves() < 0)
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)kind, &SavedFields_Type) ||
        ((PyTypeObject *)kind)->tp_basicsize != SavedFields_Type.tp_basicsize)
        return PyErr_Format(PyExc_TypeError, "SavedValues() needs a subclass of SavedFields without slots of its own");
    SavedValues *self = (SavedValues *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->core = (Core *)Py_NewRef(core);
    self->kind = (PyTypeObject *)Py_NewRef(kind);
    self->slow_pack = Py_NewRef(pack);
    self->slow_unpack = Py_NewRef(unpack);
    self->exempt = Py_NewRef(exempt);
    self->readers = Py_NewRef(readers);
    return (PyObject *)self;
}

static int SavedValues_traverse(SavedValues *self, visitproc visit, void *arg)
{
    Py_VISIT(self->core);
    Py_VISIT(self->kind);
    Py_VISIT(self->slow_pack);
    Py_VISIT(self->slow_unpack);
    Py_VISIT(self->exempt);
    Py_VISIT(self->readers);
    Py_VISIT(self->on_kept);
    return 0;
}

/* The hooks stay callable: any cycle they are in has other members that can be cleared. */
static int SavedValues_clear(SavedValues *self)
{
    Py_CLEAR(self->on_kept);
    return 0;
}

static void SavedValues_dealloc(SavedValues *self)
{
    PyObject_GC_UnTrack(self);
    while (self->first != NULL)
        unlink_value(self->first);
    SavedValues_clear(self);
    Py_XDECREF(self->core);
    Py_XDECREF(self->kind);
    Py_XDECREF(self->slow_pack);
    Py_XDECREF(self->slow_unpack);
    Py_XDECREF(self->exempt);
    Py_XDECREF(self->readers);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef SavedValues_methods[] = {
    {"pack", (PyCFunction)SavedValues_pack, METH_O, "pack($self, tensor, /)\n--\n\nKeep a tensor that is being saved."},
    {"unpack", (PyCFunction)SavedValues_unpack, METH_O,
     "unpack($self, kept, /)\n--\n\nReturn the tensor of a kept value for backward."},
    {"add", (PyCFunction)SavedValues_add, METH_O, "add($self, kept, /)\n--\n\nFollow a value that was just kept."},
    {"live", (PyCFunction)SavedValues_live, METH_NOARGS,
     "live($self, /)\n--\n\nReturn the live kept values, oldest first."},
    {"doubtful", (PyCFunction)SavedValues_doubtful, METH_NOARGS,
     "doubtful($self, /)\n--\n\nReturn the live kept values that may have changed."},
    {NULL},
};

static PyMemberDef SavedValues_members[] = {
    {"count", T_PYSSIZET, offsetof(SavedValues, count), READONLY, NULL},
    {"exempt", T_OBJECT, offsetof(SavedValues, exempt), READONLY, NULL},
    {"is_off", T_BOOL, offsetof(SavedValues, is_off), 0, NULL},
    {"on_kept", T_OBJECT, offsetof(SavedValues, on_kept), 0, NULL},
    {NULL},
};

static PyTypeObject SavedValues_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "gradsan.record._native.SavedValues",
    .tp_doc = "The live kept values, and the pack and unpack hooks for ordinary saved tensors.",
    .tp_basicsize = sizeof(SavedValues),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = SavedValues_new,
    .tp_traverse = (traverseproc)SavedValues_traverse,
    .tp_clear = (inquiry)SavedValues_clear,
    .tp_dealloc = (destructor)SavedValues_dealloc,
    .tp_methods = SavedValues_methods,
    .tp_members = SavedValues_members,
};
