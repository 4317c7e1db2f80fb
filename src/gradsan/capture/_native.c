/* The hot path of capture in C: Stack, Save and Core of _core_pure.py, which is the specification.
 *
 * Only CPython's own public C API is used (3.10 and newer), never a header or the ABI of torch: a tensor is read through
 * the descriptors that torch.Tensor shows to Python. Everything runs under the GIL; on a free-threaded build importing
 * this module brings the GIL back, which is CPython's default for a module that does not say otherwise.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#if PY_VERSION_HEX < 0x030B0000
#include <frameobject.h>
#endif
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define WRITES_KEPT 32768
#define SAVES_KEPT 65536
#define STACKS_KEPT 65536
#define DEPTH_KEPT 128

/* ---- torch, as Python shows it ---------------------------------------------------------------------------------- */

enum { VERSION, IS_LEAF, REQUIRES_GRAD, SHAPE, ATTRIBUTES };
enum { DETACH, UNTYPED_STORAGE, STORAGE_OFFSET, STRIDE, ELEMENT_SIZE, METHODS };

static const char *const attribute_texts[ATTRIBUTES] = {"_version", "is_leaf", "requires_grad", "shape"};
static const char *const method_texts[METHODS] = {"detach", "untyped_storage", "storage_offset", "stride",
                                                  "element_size"};

/* Filled by the first Core and kept for the life of the process. */
static struct {
    int ready;
    PyTypeObject *tensor, *parameter; /* types whose members may be read by descriptor; parameter NULL: it overrides */
    PyTypeObject *storage;
    PyObject *attribute_names[ATTRIBUTES], *method_names[METHODS], *cdata_name;
    PyGetSetDef *attributes[ATTRIBUTES], *cdata; /* NULL: not the kind of descriptor expected, go by attribute */
    PyObject *methods[METHODS];                  /* NULL: as above */
    PyObject *sequence_number, *is_grad_enabled, *weak_identity, *dress, *optimizer_folder, *reduction;
} torch;

/* The C getter behind `type.name`, NULL without an exception where there is none. The type keeps the descriptor alive. */
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

static int find_torch(void)
{
    static const char here[] = "gradsan.capture._torch";
    if (torch.ready)
        return 0;
    if ((torch.tensor = type_of_module("torch", "Tensor")) == NULL ||
        (torch.parameter = type_of_module("torch.nn", "Parameter")) == NULL ||
        (torch.storage = type_of_module("torch", "UntypedStorage")) == NULL ||
        (torch.sequence_number = attribute_of_module(here, "sequence_number")) == NULL ||
        (torch.is_grad_enabled = attribute_of_module(here, "is_grad_enabled")) == NULL ||
        (torch.weak_identity = attribute_of_module(here, "weak_identity")) == NULL ||
        (torch.dress = attribute_of_module(here, "dress")) == NULL ||
        (torch.optimizer_folder = attribute_of_module(here, "optimizer_folder")) == NULL ||
        (torch.reduction = attribute_of_module("gradsan.capture._core_pure", "reduction")) == NULL ||
        (torch.cdata_name = PyUnicode_InternFromString("_cdata")) == NULL)
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

/* The truth of a value that is given away; -1 with an exception, also where the value is NULL. */
static inline int truth(PyObject *given)
{
    if (given == NULL)
        return -1;
    int found = given == Py_True ? 1 : given == Py_False ? 0 : PyObject_IsTrue(given);
    Py_DECREF(given);
    return found;
}

/* The integer of a value that is given away; -1 with an exception, also where the value is NULL. */
static inline long long integer(PyObject *given)
{
    if (given == NULL)
        return -1;
    long long found = PyLong_AsLongLong(given);
    Py_DECREF(given);
    return found;
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

/* ---- Stack ------------------------------------------------------------------------------------------------------ */

/* Innermost frame first. Behind `codes` (one strong reference each) lie as many ints, the f_lasti of each frame. */
typedef struct {
    PyObject_VAR_HEAD
    uint64_t hash;
    PyObject *codes[1];
} Stack;

static PyTypeObject Stack_Type;

static inline int *lastis_of(Stack *stack)
{
    return (int *)(stack->codes + Py_SIZE(stack));
}

static inline uint64_t mixed(uint64_t hash, const void *code, int lasti)
{
    hash = (hash + ((uintptr_t)code >> 4) + ((uint64_t)(uint32_t)lasti << 36)) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ hash >> 29;
}

static Stack *new_stack(PyObject *const *codes, const int *lastis, Py_ssize_t depth, uint64_t hash)
{
    Stack *stack = PyObject_NewVar(Stack, &Stack_Type, depth);
    if (stack == NULL)
        return NULL;
    stack->hash = hash;
    memcpy(stack->codes, codes, depth * sizeof *codes);
    memcpy(lastis_of(stack), lastis, depth * sizeof *lastis);
    for (Py_ssize_t i = 0; i < depth; i++)
        Py_INCREF(codes[i]);
    return stack;
}

static PyObject *Stack_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"codes", "lastis", NULL};
    PyObject *codes, *lastis;
    int numbers[DEPTH_KEPT];
    uint64_t hash = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!:Stack", names, &PyTuple_Type, &codes, &PyTuple_Type, &lastis))
        return NULL;
    Py_ssize_t depth = PyTuple_GET_SIZE(codes);
    if (depth != PyTuple_GET_SIZE(lastis) || depth > DEPTH_KEPT) {
        PyErr_Format(PyExc_ValueError, "codes and lastis must be of one length, at most %d", DEPTH_KEPT);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < depth; i++) {
        if ((numbers[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(lastis, i))) == -1 && PyErr_Occurred())
            return NULL;
        hash = mixed(hash, PyTuple_GET_ITEM(codes, i), numbers[i]);
    }
    return (PyObject *)new_stack(PySequence_Fast_ITEMS(codes), numbers, depth, hash);
}

static void Stack_dealloc(Stack *self)
{
    for (Py_ssize_t i = 0; i < Py_SIZE(self); i++)
        Py_DECREF(self->codes[i]);
    PyObject_Free(self);
}

static PyObject *Stack_codes(Stack *self, void *Py_UNUSED(closure))
{
    PyObject *found = PyTuple_New(Py_SIZE(self));
    for (Py_ssize_t i = 0; found != NULL && i < Py_SIZE(self); i++)
        PyTuple_SET_ITEM(found, i, Py_NewRef(self->codes[i]));
    return found;
}

static PyObject *Stack_lastis(Stack *self, void *Py_UNUSED(closure))
{
    PyObject *found = PyTuple_New(Py_SIZE(self));
    for (Py_ssize_t i = 0; found != NULL && i < Py_SIZE(self); i++) {
        PyObject *lasti = PyLong_FromLong(lastis_of(self)[i]);
        if (lasti == NULL)
            Py_CLEAR(found);
        else
            PyTuple_SET_ITEM(found, i, lasti);
    }
    return found;
}

static PyGetSetDef Stack_getset[] = {
    {"codes", (getter)Stack_codes, NULL, "The code objects, innermost frame first.", NULL},
    {"lastis", (getter)Stack_lastis, NULL, "For each code object, f_lasti at the moment of capture.", NULL},
    {NULL},
};

static PyTypeObject Stack_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "gradsan.capture._native.Stack",
    .tp_doc = "A raw stack, innermost frame first: code objects and instruction offsets, no frame.",
    .tp_basicsize = offsetof(Stack, codes),
    .tp_itemsize = sizeof(PyObject *) + sizeof(int),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = Stack_new,
    .tp_dealloc = (destructor)Stack_dealloc,
    .tp_getset = Stack_getset,
};

/* ---- Save ------------------------------------------------------------------------------------------------------- */

/* Not tracked by the garbage collector: from the alias it keeps there is no way back to the graph that keeps it, and
 * the graph's own references to it are C++ references, which the collector could not follow anyway. */
typedef struct {
    PyObject_HEAD
    PyObject *tensor, *stack;
    long long clock;
    unsigned int version; /* torch counts in 32 bits as well */
    char was_leaf;
} Save;

static PyTypeObject Save_Type;

static void Save_dealloc(Save *self)
{
    Py_XDECREF(self->tensor);
    Py_XDECREF(self->stack);
    PyObject_Free(self);
}

static PyMemberDef Save_members[] = {
    {"clock", T_LONGLONG, offsetof(Save, clock), 0, NULL},
    {"stack", T_OBJECT_EX, offsetof(Save, stack), 0, NULL},
    {"tensor", T_OBJECT_EX, offsetof(Save, tensor), 0, NULL},
    {"version", T_UINT, offsetof(Save, version), 0, NULL},
    {"was_leaf", T_BOOL, offsetof(Save, was_leaf), 0, NULL},
    {NULL},
};

static PyTypeObject Save_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "gradsan.capture._native.Save",
    .tp_doc = "What the pack hook leaves with autograd in place of the tensor.",
    .tp_basicsize = sizeof(Save),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)Save_dealloc,
    .tp_members = Save_members,
};

/* ---- bounded logs ----------------------------------------------------------------------------------------------- */

typedef struct {
    char *items;
    size_t capacity, first, count; /* capacity is 0 or a power of two */
} Ring;

/* The place for one more item. Where the ring is full, the oldest item is moved to `dropped` and its place is given;
 * otherwise `dropped` is filled with zeros. NULL with an exception where memory is short. */
static inline void *ring_push(Ring *ring, size_t size, size_t most, void *dropped)
{
    memset(dropped, 0, size);
    if (ring->count == ring->capacity) {
        if (ring->capacity == most) {
            char *place = ring->items + ring->first * size;
            memcpy(dropped, place, size);
            ring->first = (ring->first + 1) & (most - 1);
            return place;
        }
        /* A ring that has not reached its bound has never wrapped: its first item is at 0. */
        size_t wider = ring->capacity ? ring->capacity * 2 : 256;
        char *items = PyMem_Realloc(ring->items, wider * size);
        if (items == NULL)
            return PyErr_NoMemory();
        ring->items = items;
        ring->capacity = wider;
    }
    return ring->items + ring->count++ * size;
}

/* The items, oldest first, in new memory; the caller takes over its own references. NULL with an exception. */
static void *ring_copy(const Ring *ring, size_t size)
{
    char *items = PyMem_Malloc(ring->count ? ring->count * size : 1);
    if (items == NULL)
        return PyErr_NoMemory();
    size_t before_wrap = ring->capacity - ring->first < ring->count ? ring->capacity - ring->first : ring->count;
    if (ring->count) {
        memcpy(items, ring->items + ring->first * size, before_wrap * size);
        memcpy(items + before_wrap * size, ring->items, (ring->count - before_wrap) * size);
    }
    return items;
}

typedef struct {
    long long sequence;
    PyObject *stack;
} LoggedSave;

/* References in the order in which writes() shows them. */
enum { W_STORAGE, W_VERSION, W_OP, W_KIND, W_OFFSET, W_SHAPE, W_STRIDE, W_ITEMSIZE, W_INDEX, W_STACK, W_REFERENCES };

typedef struct {
    long long clock, sequence, steps;
    PyObject *references[W_REFERENCES];
    char grad_enabled, is_parameter;
} LoggedWrite;

static void drop_references(LoggedWrite *write)
{
    for (int i = 0; i < W_REFERENCES; i++)
        Py_CLEAR(write->references[i]);
}

/* ---- Core ------------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    char active;
    long long clock, saves, write_count, steps, open_steps, silent_clock, log_errors;
    PyObject *on_stale, *optimizer_folder, *pack, *unpack;
    Stack **stacks; /* open addressing; capacity is 0 or a power of two, at most half full */
    size_t stack_capacity, stack_count;
    Ring recent_saves, writes;
} Core;

static PyTypeObject Core_Type;

/* Forgetting runs foreign code (a code object can have weak references), so a log is emptied before it is let go. */
static void forget_stacks(Core *core)
{
    Stack **stacks = core->stacks;
    size_t capacity = core->stack_capacity;
    core->stacks = NULL;
    core->stack_capacity = core->stack_count = 0;
    for (size_t i = 0; i < capacity; i++)
        Py_XDECREF(stacks[i]);
    PyMem_Free(stacks);
}

static void forget_logs(Core *core)
{
    Ring saves = core->recent_saves, writes = core->writes;
    memset(&core->recent_saves, 0, sizeof(Ring));
    memset(&core->writes, 0, sizeof(Ring));
    for (size_t i = 0; i < saves.count; i++)
        Py_DECREF(((LoggedSave *)saves.items)[i].stack);
    for (size_t i = 0; i < writes.count; i++)
        drop_references((LoggedWrite *)writes.items + i);
    PyMem_Free(saves.items);
    PyMem_Free(writes.items);
}

static int widen_stacks(Core *core)
{
    size_t capacity = core->stack_capacity ? core->stack_capacity * 2 : 256;
    Stack **stacks = PyMem_Calloc(capacity, sizeof *stacks);
    if (stacks == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < core->stack_capacity; i++) {
        Stack *stack = core->stacks[i];
        if (stack == NULL)
            continue;
        size_t place = stack->hash & (capacity - 1);
        while (stacks[place] != NULL)
            place = (place + 1) & (capacity - 1);
        stacks[place] = stack;
    }
    PyMem_Free(core->stacks);
    core->stacks = stacks;
    core->stack_capacity = capacity;
    return 0;
}

static inline int lasti_of(PyFrameObject *frame)
{
#if PY_VERSION_HEX >= 0x030B0000
    return PyFrame_GetLasti(frame);
#else
    return frame->f_lasti < 0 ? -1 : frame->f_lasti * (int)sizeof(_Py_CODEUNIT);
#endif
}

/* The stack of the Python frame that runs, `skip` frames further out: a new reference, equal stacks being one object.
 * It is empty where no Python frame is left (a hook called in a thread of the engine). */
static PyObject *stack_here(Core *core, long long skip)
{
    PyObject *codes[DEPTH_KEPT];
    int lastis[DEPTH_KEPT];
    Py_ssize_t depth = 0;
    uint64_t hash = 0;
    PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
    while (frame != NULL && depth < DEPTH_KEPT) {
        if (skip > 0)
            skip--;
        else {
            /* Borrowed: every frame seen here is suspended below us and keeps its code alive. */
            PyObject *code = (PyObject *)PyFrame_GetCode(frame);
            Py_DECREF(code);
            codes[depth] = code;
            lastis[depth] = lasti_of(frame);
            hash = mixed(hash, code, lastis[depth]);
            depth++;
        }
        PyFrameObject *outer = PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = outer;
    }
    Py_XDECREF(frame);
    if (PyErr_Occurred())
        return NULL;

    if (core->stack_count >= STACKS_KEPT)
        for (size_t place = hash & (core->stack_capacity - 1);; place = (place + 1) & (core->stack_capacity - 1)) {
            Stack *known = core->stacks[place];
            if (known == NULL) {
                forget_stacks(core);
                break;
            }
            if (known->hash == hash && Py_SIZE(known) == depth && !memcmp(known->codes, codes, depth * sizeof *codes) &&
                !memcmp(lastis_of(known), lastis, depth * sizeof *lastis))
                return Py_NewRef(known);
        }
    if (core->stack_count * 2 >= core->stack_capacity && widen_stacks(core) < 0)
        return NULL;
    size_t place = hash & (core->stack_capacity - 1);
    for (Stack *known; (known = core->stacks[place]) != NULL; place = (place + 1) & (core->stack_capacity - 1))
        if (known->hash == hash && Py_SIZE(known) == depth && !memcmp(known->codes, codes, depth * sizeof *codes) &&
            !memcmp(lastis_of(known), lastis, depth * sizeof *lastis))
            return Py_NewRef(known);
    Stack *stack = new_stack(codes, lastis, depth, hash);
    if (stack == NULL)
        return NULL;
    core->stacks[place] = stack;
    core->stack_count++;
    return Py_NewRef(stack);
}
