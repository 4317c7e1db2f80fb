/* Stacks, and the bounded logs of writes, Nodes, steps and backward calls. Part of _native.c, which includes it once: one unit to compile. */

/* ---- Stack ------------------------------------------------------------------------------------------------------ */

/* Innermost frame first. `codes` (one strong reference each) is followed by as many ints, the f_lasti of each frame. */
typedef struct {
    PyObject_VAR_HEAD
    uint64_t hash;
    long long rounds; /* the number of backward calls made here */
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
    stack->rounds = 0;
    memcpy(stack->codes, codes, depth * sizeof *codes);
    memcpy(lastis_of(stack), lastis, depth * sizeof *lastis);
    for (Py_ssize_t i = 0; i < depth; i++)
        Py_INCREF(codes[i]);
    return stack;
}

static PyObject *Stack_new(PyTypeObject *Py_UNUSED(type), PyObject *args, PyObject *kwargs)
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
    .tp_name = "gradsan.record._native.Stack",
    .tp_doc = "A raw stack, innermost frame first: code objects and instruction offsets, no frame.",
    .tp_basicsize = offsetof(Stack, codes),
    .tp_itemsize = sizeof(PyObject *) + sizeof(int),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = Stack_new,
    .tp_dealloc = (destructor)Stack_dealloc,
    .tp_getset = Stack_getset,
};

/* ---- bounded logs ----------------------------------------------------------------------------------------------- */

typedef struct {
    char *items;
    size_t capacity, first, count; /* capacity is 0 or a power of two */
} Ring;

/* The slot for one more item. If the ring is full, the oldest item is moved to `dropped` and its slot is reused;
 * otherwise `dropped` is zeroed. NULL with an exception if memory is short. */
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
        /* A ring below its bound has never wrapped: its first item is at 0. */
        size_t wider = ring->capacity ? ring->capacity * 2 : 256;
        char *items = PyMem_Realloc(ring->items, wider * size);
        if (items == NULL)
            return PyErr_NoMemory();
        ring->items = items;
        ring->capacity = wider;
    }
    return ring->items + ring->count++ * size;
}

/* Nodes with the sequence numbers first <= n < end, made in one thread by one call. */
typedef struct {
    long long first, end, clock;
    unsigned long thread;
    PyObject *stack;
} LoggedNodes;

/* A list of numbers that needs no allocation while it is short. */
typedef struct {
    int count, capacity;
    long long *many, few[8]; /* many: NULL while they are few */
} Numbers;

static void start_numbers(Numbers *numbers)
{
    numbers->count = 0;
    numbers->capacity = sizeof numbers->few / sizeof *numbers->few;
    numbers->many = NULL;
}

static inline long long *items_of(Numbers *numbers)
{
    return numbers->many == NULL ? numbers->few : numbers->many;
}

static void forget_numbers(Numbers *numbers)
{
    PyMem_Free(numbers->many);
    start_numbers(numbers);
}

/* Makes room for so many more; -1 with an exception. */
static int reserve_numbers(Numbers *numbers, Py_ssize_t more)
{
    Py_ssize_t needed = numbers->count + more, doubled = 2 * (Py_ssize_t)numbers->capacity;
    if (needed <= numbers->capacity)
        return 0;
    Py_ssize_t capacity = needed > doubled ? needed : doubled;
    long long *wider = capacity > INT_MAX ? NULL : PyMem_Realloc(numbers->many, capacity * sizeof *wider);
    if (wider == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (numbers->many == NULL)
        memcpy(wider, numbers->few, sizeof numbers->few);
    numbers->many = wider;
    numbers->capacity = (int)capacity;
    return 0;
}

static int add_number(Numbers *numbers, long long number)
{
    if (numbers->count == numbers->capacity && reserve_numbers(numbers, 1) < 0)
        return -1;
    items_of(numbers)[numbers->count++] = number;
    return 0;
}

/* Every `each`-th number, the first of them at `from`. */
static PyObject *as_bytes(Numbers *numbers, int from, int each)
{
    int count = numbers->count / each;
    PyObject *found = PyBytes_FromStringAndSize(NULL, count * sizeof(long long));
    for (int i = 0; found != NULL && i < count; i++)
        memcpy(PyBytes_AS_STRING(found) + i * sizeof(long long), items_of(numbers) + from + i * each, sizeof(long long));
    return found;
}

enum { W_OP, W_KIND, W_SHAPE, W_STRIDE, W_INDEX, W_STACK, W_REFERENCES };

/* Numbers are stored as integers, and tuples shared between writes: once the log is full every new write releases an
 * old one, which must not touch memory that has long left the processor's caches. */
typedef struct {
    long long clock, storage, version, offset, sequence, steps; /* version is -1 if it is unknown */
    PyObject *references[W_REFERENCES];
    int itemsize;
    char grad_enabled, is_parameter;
} LoggedWrite;

/* The beginning of an optimizer step (`name` is its class, `numbers` the storage and version of each of its parameters)
 * or its end (`name` and `stack` are NULL, `numbers` the versions). Integers in one place for the same reason. */
typedef struct {
    long long clock, steps, sequence;
    void *optimizer;
    PyObject *name, *stack;
    Numbers numbers;
} LoggedStep;

/* A call into the engine; the fields of an entry of Core.backward_log. */
typedef struct {
    long long clock, begun, ended, steps;
    unsigned long long life;
    unsigned long thread;
    PyObject *stack, *retain, *accumulate;
    PyObject *outputs; /* a weak reference, or a tuple of them and of None */
} LoggedBackward;

static void drop_step(LoggedStep *step)
{
    Py_CLEAR(step->name);
    Py_CLEAR(step->stack);
    forget_numbers(&step->numbers);
}

static void drop_backward(LoggedBackward *backward)
{
    Py_CLEAR(backward->stack);
    Py_CLEAR(backward->retain);
    Py_CLEAR(backward->accumulate);
    Py_CLEAR(backward->outputs);
}

static void drop_references(LoggedWrite *write)
{
    for (int i = 0; i < W_REFERENCES; i++)
        Py_CLEAR(write->references[i]);
}

/* Cache of recent tuples of ints, by a hash of their content; a new one replaces another. */
#define TUPLES_KEPT 1024
static PyObject *shared_tuples[TUPLES_KEPT];

/* A new reference to a plain tuple equal to `given`, the same one each time while it is cached. Steals the reference to
 * `given`, which may be NULL. Anything but a tuple of ints is returned unchanged. */
static PyObject *shared(PyObject *given)
{
    long long numbers[16];
    if (given == NULL || !PyTuple_Check(given))
        return given;
    Py_ssize_t count = PyTuple_GET_SIZE(given);
    int is_common = count <= 16;
    uint64_t hash = (uint64_t)count;
    for (Py_ssize_t i = 0; is_common && i < count; i++) {
        PyObject *item = PyTuple_GET_ITEM(given, i);
        int overflow = 1;
        if (PyLong_CheckExact(item))
            numbers[i] = PyLong_AsLongLongAndOverflow(item, &overflow);
        is_common = !overflow;
        if (is_common)
            hash = mixed(hash, NULL, 0) + (uint64_t)numbers[i];
    }
    PyObject **place = NULL;
    if (is_common) {
        place = shared_tuples + mixed(hash, NULL, 0) % TUPLES_KEPT;
        PyObject *known = *place;
        int is_equal = known != NULL && PyTuple_GET_SIZE(known) == count;
        for (Py_ssize_t i = 0; is_equal && i < count; i++) {
            PyObject *item = PyTuple_GET_ITEM(known, i);
            is_equal = item == PyTuple_GET_ITEM(given, i) || PyLong_AsLongLong(item) == numbers[i];
        }
        if (is_equal) {
            Py_DECREF(given);
            return Py_NewRef(known);
        }
    }
    if (!PyTuple_CheckExact(given)) {
        PyObject *plain = PyTuple_GetSlice(given, 0, count);
        Py_DECREF(given);
        given = plain;
    }
    if (place != NULL && given != NULL) {
        PyObject *forgotten = *place;
        *place = Py_NewRef(given);
        Py_XDECREF(forgotten);
    }
    return given;
}
