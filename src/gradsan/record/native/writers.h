/* Wrappers of functions that write or make Nodes. Part of _native.c, which includes it once: one unit to compile. */

/* ---- writers ---------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *original;
    Core *core;
    /* The C function behind a __setitem__ that a C type defines, and the type of its instances. */
    objobjargproc assign;
    PyTypeObject *indexed;
    Py_ssize_t position;       /* -1: none */
    char is_setitem, is_plain; /* is_plain: writes nothing, wrapped for the Nodes it makes */
    char is_operator;          /* calls an operator, its first argument: `on_operator` knows its writes */
    PyObject *op, *kind;
    PyObject *keyword; /* NULL: none */
    PyObject *before, *after; /* callbacks of a listener around the original; NULL: none, or no listener */
    PyObject *unbound;        /* for a C method bound to one tensor: the writer in the class; else NULL */
    PyObject *dictionary, *weak_references;
} Writer;

static inline int is_writer(PyObject *object)
{
    return Py_IS_TYPE(object, &MethodWriter_Type) || Py_IS_TYPE(object, &FunctionWriter_Type);
}

/* New reference: `index` as a tuple if it consists of ints, slices of ints, None and ... only; else None. */
static PyObject *basic_index(PyObject *index)
{
    PyObject *const *parts = PyTuple_CheckExact(index) ? PySequence_Fast_ITEMS(index) : &index;
    Py_ssize_t count = PyTuple_CheckExact(index) ? PyTuple_GET_SIZE(index) : 1;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (PySlice_Check(parts[i])) {
            PySliceObject *slice = (PySliceObject *)parts[i];
            if ((slice->start != Py_None && !PyLong_CheckExact(slice->start)) ||
                (slice->stop != Py_None && !PyLong_CheckExact(slice->stop)) ||
                (slice->step != Py_None && !PyLong_CheckExact(slice->step)))
                Py_RETURN_NONE;
        } else if (!PyLong_CheckExact(parts[i]) && parts[i] != Py_None && parts[i] != Py_Ellipsis)
            Py_RETURN_NONE;
    }
    return shared(PyTuple_CheckExact(index) ? Py_NewRef(index) : PyTuple_Pack(1, index));
}

static inline int is_of_optimizers(Core *core, PyCodeObject *code)
{
    return core->optimizer_folder != NULL && PyUnicode_Check(core->optimizer_folder)
               ? (int)PyUnicode_Tailmatch(code->co_filename, core->optimizer_folder, 0, PY_SSIZE_T_MAX, -1)
               : 0;
}

/* Whether the caller is code of torch's optimizers, whose inner writes are accounted for per step. */
static int called_by_optimizer(Core *core)
{
    PyCodeObject *code = running_code();
    if (code == NULL)
        return 0;
    /* An optimizer's update is one function that calls dozens of operations. */
    if ((PyObject *)code == core->optimizer_code)
        return 1;
    int found = is_of_optimizers(core, code);
    if (found > 0) {
        PyObject *before = core->optimizer_code;
        core->optimizer_code = Py_NewRef((PyObject *)code);
        Py_XDECREF(before);
    }
    return found;
}

static int log_target(Writer *writer, PyObject *target, PyObject *key)
{
    Core *core = writer->core;
    int found;
    PyObject *index = key == NULL ? Py_NewRef(Py_None) : basic_index(key);
    PyObject *stack = index == NULL ? NULL : stack_here(core, 0);
    if (stack == NULL || (found = is_tensor(target)) < 0)
        found = -1;
    else if (found)
        found = log_write(core, target, writer->op, writer->kind, index, stack);
    else if (PyTuple_Check(target) || PyList_Check(target))
        /* The size is read again each time: a tensor subclass may run Python code that changes the list. */
        for (Py_ssize_t i = 0; found == 0 && i < PySequence_Fast_GET_SIZE(target); i++) {
            PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(target, i));
            if ((found = is_tensor(item)) > 0)
                found = log_write(core, item, writer->op, writer->kind, index, stack);
            Py_DECREF(item);
        }
    Py_XDECREF(index);
    Py_XDECREF(stack);
    return found;
}

/* Borrowed: the value passed by keyword `name`, NULL if there is none. */
static PyObject *passed_by_keyword(PyObject *name, PyObject *const *values, PyObject *keywords)
{
    Py_ssize_t count = PyTuple_GET_SIZE(keywords);
    for (Py_ssize_t i = 0; i < count; i++)
        if (PyTuple_GET_ITEM(keywords, i) == name)
            return values[i];
    for (Py_ssize_t i = 0; i < count; i++)
        if (PyUnicode_GET_LENGTH(PyTuple_GET_ITEM(keywords, i)) == PyUnicode_GET_LENGTH(name) &&
            PyUnicode_Compare(PyTuple_GET_ITEM(keywords, i), name) == 0)
            return values[i];
    return NULL;
}

/* Logs that the current call has made the Nodes from `first` up to `end`. */
static int log_nodes(Core *core, long long first, long long end)
{
    unsigned long thread = PyThread_get_thread_ident();
    LoggedNodes *last = core->nodes.count ? nodes_at(&core->nodes, core->nodes.count - 1) : NULL;
    if (last != NULL && last->thread == thread && last->first == first && last->end == end &&
        last->clock == core->clock)
        return 0; /* a call within this one has logged them */
    PyObject *stack = stack_here(core, 0);
    if (stack == NULL)
        return -1;
    last = core->nodes.count ? nodes_at(&core->nodes, core->nodes.count - 1) : NULL;
    core->saves++;
    /* The same line again and nothing logged in between: one entry serves a whole loop. */
    if (last != NULL && last->thread == thread && last->stack == stack && last->end == first && last->clock == core->clock) {
        last->end = end;
        Py_DECREF(stack);
        return 0;
    }
    LoggedNodes dropped, *place = ring_push(&core->nodes, sizeof(LoggedNodes), NODES_KEPT, &dropped);
    if (place == NULL) {
        Py_DECREF(stack);
        return -1;
    }
    *place = (LoggedNodes){first, end, ++core->clock, thread, stack};
    Py_XDECREF(dropped.stack);
    return 0;
}

/* Counts a failure of logging; returns -1 if it must reach the program: no Exception, or one of `lets_pass`. */
static int forgive(Core *core)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception) ||
        (is_set(core->lets_pass) && PyErr_ExceptionMatches(core->lets_pass)))
        return -1;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(value, traceback);
        if (truth(PyObject_CallOneArg(torch.is_of_signal, value)) > 0) {
            PyErr_Restore(type, value, traceback);
            return -1;
        }
        PyErr_Clear();
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    core->log_errors++;
    return 0;
}

/* New reference: the result of `listener`, called with `first` (if not NULL), the positional and the named arguments of
 * a call, and then `result`. */
static PyObject *call_with_arguments(PyObject *listener, PyObject *first, PyObject *const *args, Py_ssize_t count,
                                PyObject *keywords, PyObject *result)
{
    PyObject *given = PyTuple_New(count), *named = PyDict_New(), *returned = NULL;
    int failed = given == NULL || named == NULL;
    for (Py_ssize_t i = 0; !failed && i < count; i++)
        PyTuple_SET_ITEM(given, i, Py_NewRef(args[i]));
    for (Py_ssize_t i = 0; !failed && keywords != NULL && i < PyTuple_GET_SIZE(keywords); i++)
        failed = PyDict_SetItem(named, PyTuple_GET_ITEM(keywords, i), args[count + i]) < 0;
    if (!failed) {
        Py_INCREF(listener);
        PyObject *arguments =
            first == NULL ? PyTuple_Pack(2, given, named) : PyTuple_Pack(4, first, given, named, result);
        returned = arguments == NULL ? NULL : call_listener(listener, arguments);
        Py_XDECREF(arguments);
        Py_DECREF(listener);
    }
    Py_XDECREF(given);
    Py_XDECREF(named);
    return returned;
}

static int notify_call(PyObject *listener, PyObject *first, PyObject *const *args, Py_ssize_t count, PyObject *keywords,
                     PyObject *result)
{
    PyObject *returned = call_with_arguments(listener, first, args, count, keywords, result);
    Py_XDECREF(returned);
    return returned == NULL ? -1 : 0;
}

/* Calls `on_operator` with all arguments of a call of the operator args[0], unless it is known to write nothing. */
static int notify_operator(Core *core, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    PyObject *number = PyLong_FromVoidPtr(args[0]);
    int is_quiet = number == NULL ? -1 : PySet_Contains(core->quiet_operators, number);
    Py_XDECREF(number);
    return is_quiet != 0 ? is_quiet : notify_call(core->on_operator, NULL, args, count, keywords, NULL);
}

/* Logs and reports the Nodes from number `first` on that a call has made, and that `holder` holds; -1: the exception
 * must reach the program. */
static int notify_nodes(Core *core, long long first, PyObject *holder)
{
    long long end = sequence_here();
    if (end == first)
        return 0;
    if (log_nodes(core, first, end) < 0 && forgive(core) < 0)
        return -1;
    if ((end < core->quiet_from || end - core->quiet_from >= core->quiet_nodes) && is_set(core->on_quiet)) {
        PyObject *returned = call_held(core->on_quiet, "(L)", end);
        if (returned == NULL && forgive(core) < 0)
            return -1;
        Py_XDECREF(returned);
    }
    if (is_set(core->on_nodes)) {
        PyObject *returned = call_held(core->on_nodes, "(OLL)", holder, first, end);
        if (returned == NULL && forgive(core) < 0)
            return -1;
        Py_XDECREF(returned);
    }
    return 0;
}

/* Whether the current call is logged: not gradsan's own, and not in an optimizer, whose writes are accounted for per
 * step. -1 with an exception. */
static inline int is_logged(Core *core)
{
    if (!core->active || own_calls)
        return 0;
    if (!core->open_steps)
        return 1;
    int inside = called_by_optimizer(core);
    return inside < 0 ? forgive(core) : !inside;
}

/* The tensors that a call of a writer writes, borrowed; NULL if there are none. */
static PyObject *target_of(Writer *writer, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    int has_keywords = keywords != NULL && PyTuple_GET_SIZE(keywords) > 0;
    if (writer->is_setitem)
        return count > 1 ? args[0] : NULL;
    if (writer->keyword != NULL) {
        PyObject *given = has_keywords ? passed_by_keyword(writer->keyword, args + count, keywords) : NULL;
        return given == Py_None ? NULL : given;
    }
    if (writer->position >= 0 && count > writer->position)
        return args[writer->position];
    return has_keywords ? args[count] : NULL;
}

/* Calls `before_write` with the tensors about to be written; -1: the exception must reach the program. */
static int notify_before(Writer *writer, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    PyObject *target = target_of(writer, args, count, keywords);
    if (target == NULL)
        return 0;
    PyObject *returned = call_held(writer->core->before_write, "(O)", target);
    Py_XDECREF(returned);
    return returned == NULL ? forgive(writer->core) : 0;
}

/* The call of a writer; through `bound`, if not NULL, which has the first argument bound. */
static PyObject *call_writer(Writer *writer, PyObject *bound, PyObject *const *args, size_t flagged_count,
                             PyObject *keywords)
{
    Py_ssize_t count = PyVectorcall_NARGS(flagged_count);
    Core *core = writer->core;
    int is_active = is_logged(core);
    if (is_active < 0)
        return NULL;
    if (is_active && is_set(core->before_write) && !writer->is_plain && !writer->is_operator &&
        notify_before(writer, args, count, keywords) < 0)
        return NULL;
    long long first = is_active ? sequence_here() : 0;
    PyObject *result;
    if (bound != NULL)
        result = PyObject_Vectorcall(bound, args + 1, (size_t)count - 1, keywords);
    else if (writer->assign != NULL && count == 3 && keywords == NULL && PyObject_TypeCheck(args[0], writer->indexed))
        result = writer->assign(args[0], args[1], args[2]) < 0 ? NULL : Py_NewRef(Py_None);
    else
        result = PyObject_Vectorcall(writer->original, args, flagged_count, keywords);
    if (result == NULL || !is_active || !core->active)
        return result;
    if (notify_nodes(core, first, result == Py_None && count > 0 ? args[0] : result) < 0) {
        Py_DECREF(result);
        return NULL;
    }
    if (is_set(core->on_result) && notify_call(core->on_result, writer->op, args, count, keywords, result) < 0 &&
        forgive(core) < 0) {
        Py_DECREF(result);
        return NULL;
    }
    if (writer->is_operator && count > 0 && is_set(core->on_operator) &&
        notify_operator(core, args, count, keywords) < 0 && forgive(core) < 0) {
        Py_DECREF(result);
        return NULL;
    }
    if (writer->is_plain)
        return result;

    PyObject *target = target_of(writer, args, count, keywords), *key = writer->is_setitem && count > 1 ? args[1] : NULL;
    if (target != NULL && log_target(writer, target, key) < 0 && forgive(core) < 0)
        Py_CLEAR(result);
    return result;
}

static PyObject *Writer_vectorcall(PyObject *self, PyObject *const *args, size_t flagged_count, PyObject *keywords)
{
    return call_writer((Writer *)self, NULL, args, flagged_count, keywords);
}

/* The call of a listener. There is no frame of ours between the program's and the original's, so that warnings, their
 * stack levels, tracebacks and the recursion depth are unchanged. */
static PyObject *call_between(Writer *listener, PyObject *bound, PyObject *const *args, size_t flagged_count,
                              PyObject *keywords)
{
    Py_ssize_t count = PyVectorcall_NARGS(flagged_count);
    Core *core = listener->core;
    PyObject *noted = NULL;
    int is_heard = core->active && !own_calls;
    if (is_heard && listener->before != NULL) {
        noted = call_with_arguments(listener->before, NULL, args, count, keywords, NULL);
        if (noted == NULL && forgive(core) < 0)
            return NULL;
    } else if (is_heard)
        noted = Py_NewRef(Py_None);
    PyObject *result = bound != NULL ? PyObject_Vectorcall(bound, args + 1, (size_t)count - 1, keywords)
                                     : PyObject_Vectorcall(listener->original, args, flagged_count, keywords);
    int has_answer = noted != NULL && (listener->before == NULL || noted != Py_None);
    if (result != NULL && has_answer && core->active && listener->after != NULL &&
        notify_call(listener->after, noted, args, count, keywords, result) < 0 && forgive(core) < 0)
        Py_CLEAR(result);
    Py_XDECREF(noted);
    return result;
}

static PyObject *Listener_vectorcall(PyObject *self, PyObject *const *args, size_t flagged_count, PyObject *keywords)
{
    return call_between((Writer *)self, NULL, args, flagged_count, keywords);
}

/* The call of a C method read from a tensor, `add = x.add_`: like that of the writer or listener in the class. */
static PyObject *Bound_vectorcall(PyObject *self, PyObject *const *args, size_t flagged_count, PyObject *keywords)
{
    Writer *method = (Writer *)self, *wrapper = (Writer *)method->unbound;
    Py_ssize_t count = PyVectorcall_NARGS(flagged_count);
    Py_ssize_t all = 1 + count + (keywords == NULL ? 0 : PyTuple_GET_SIZE(keywords));
    PyObject *few[8], **given = all <= 8 ? few : PyMem_Malloc((size_t)all * sizeof(PyObject *));
    if (given == NULL)
        return PyErr_NoMemory();
    given[0] = PyCFunction_GET_SELF(method->original);
    for (Py_ssize_t i = 1; i < all; i++)
        given[i] = args[i - 1];
    PyObject *result = wrapper->vectorcall == Writer_vectorcall
                           ? call_writer(wrapper, method->original, given, (size_t)count + 1, keywords)
                           : call_between(wrapper, method->original, given, (size_t)count + 1, keywords);
    if (given != few)
        PyMem_Free(given);
    return result;
}

/* Calls a relay's `before` with the argument: stores the argument for the hook and the note into `given` and `noted`,
 * returns 1 if `after` is to be called; or stores the final value into `result`, returns 0; -1 with an exception. */
static int call_relay_before(Writer *relay, PyObject **given, PyObject **noted, PyObject **result)
{
    if (relay->before == NULL)
        return relay->core->active;
    PyObject *arguments = PyTuple_Pack(1, *given);
    PyObject *returned = arguments == NULL ? NULL : call_listener(relay->before, arguments);
    Py_XDECREF(arguments);
    if (returned == NULL)
        return -1;
    int answer = returned != Py_None;
    if (answer && (!PyTuple_Check(returned) || PyTuple_GET_SIZE(returned) < 1 || PyTuple_GET_SIZE(returned) > 2)) {
        PyErr_SetString(PyExc_TypeError, "a relay was answered neither None nor a tuple of one or two");
        answer = -1;
    } else if (answer && PyTuple_GET_SIZE(returned) == 1) {
        *result = Py_NewRef(PyTuple_GET_ITEM(returned, 0));
        answer = 0;
    } else if (answer) {
        Py_SETREF(*given, Py_NewRef(PyTuple_GET_ITEM(returned, 0)));
        Py_SETREF(*noted, Py_NewRef(PyTuple_GET_ITEM(returned, 1)));
    }
    Py_DECREF(returned);
    return answer;
}

/* The call of a relay, documented in _writer_pure.py; like a listener's, without a frame of ours. */
static PyObject *Relay_vectorcall(PyObject *self, PyObject *const *args, size_t flagged_count, PyObject *keywords)
{
    Writer *relay = (Writer *)self;
    if (PyVectorcall_NARGS(flagged_count) != 1 || (keywords != NULL && PyTuple_GET_SIZE(keywords) > 0))
        return PyErr_Format(PyExc_TypeError, "a saved-tensor hook takes one argument");
    PyObject *given = Py_NewRef(args[0]), *noted = Py_NewRef(Py_None), *result = NULL;
    int has_answer = call_relay_before(relay, &given, &noted, &result);
    if (has_answer >= 0 && result == NULL)
        result = PyObject_CallOneArg(relay->original, given);
    if (has_answer > 0 && result != NULL) {
        PyObject *arguments = PyTuple_Pack(3, noted, given, result);
        Py_SETREF(result, arguments == NULL ? NULL : call_listener(relay->after, arguments));
        Py_XDECREF(arguments);
    }
    Py_DECREF(given);
    Py_DECREF(noted);
    return result;
}

static int Writer_traverse(Writer *self, visitproc visit, void *arg)
{
    Py_VISIT(self->original);
    Py_VISIT(self->before);
    Py_VISIT(self->after);
    Py_VISIT(self->unbound);
    Py_VISIT(self->core);
    Py_VISIT(self->dictionary);
    return 0;
}

/* Only the dictionary: a writer stays callable, and any cycle it is in has other members that can be cleared. */
static int Writer_clear(Writer *self)
{
    Py_CLEAR(self->dictionary);
    return 0;
}

static void Writer_dealloc(Writer *self)
{
    PyObject_GC_UnTrack(self);
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    Py_XDECREF(self->original);
    Py_XDECREF(self->before);
    Py_XDECREF(self->after);
    Py_XDECREF(self->unbound);
    Py_XDECREF(self->op);
    Py_XDECREF(self->kind);
    Py_XDECREF(self->keyword);
    Py_XDECREF(self->dictionary);
    Py_XDECREF(self->core);
    PyObject_GC_Del(self);
}

static PyObject *Writer_get(PyObject *self, PyObject *instance, PyObject *owner);

static PyObject *Writer_repr(Writer *self)
{
    return PyObject_Repr(self->original);
}

/* Attributes of a wrapper are its original's, `__class__` too, so that isinstance and inspect take it for that; but
 * calling, comparing and pickling are its own. */
static PyObject *Writer_getattro(PyObject *self, PyObject *name)
{
    int is_own = PySet_Contains(torch.own_names, name);
    if (is_own < 0)
        return NULL;
    return is_own ? PyObject_GenericGetAttr(self, name) : PyObject_GetAttr(((Writer *)self)->original, name);
}

/* Attributes that the program sets on a function of torch stay there after watching has ended. */
static int Writer_setattro(PyObject *self, PyObject *name, PyObject *value)
{
    return PyObject_SetAttr(((Writer *)self)->original, name, value);
}

/* A writer equals its original: torch passes the writer to __torch_function__, where programs look functions up in
 * tables that they filled before. */
static Py_hash_t Writer_hash(Writer *self)
{
    return PyObject_Hash(self->original);
}

static PyObject *Writer_compare(PyObject *self, PyObject *other, int operation)
{
    if (operation != Py_EQ && operation != Py_NE)
        Py_RETURN_NOTIMPLEMENTED;
    return PyObject_RichCompare(((Writer *)self)->original, is_writer(other) ? ((Writer *)other)->original : other,
                                operation);
}

static PyObject *Writer_reduce(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    return PyObject_CallFunctionObjArgs(torch.reduction, self, ((Writer *)self)->original, NULL);
}

static PyObject *Writer_itself(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    return Py_NewRef(self);
}

static PyMethodDef Writer_methods[] = {
    {"__reduce__", Writer_reduce, METH_NOARGS, NULL},
    {"__copy__", Writer_itself, METH_NOARGS, NULL},
    {"__deepcopy__", Writer_itself, METH_O, NULL},
    {NULL},
};

static PyGetSetDef Writer_getset[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL},
};

#define WRITER_SLOTS                                                                                                   \
    .tp_basicsize = sizeof(Writer), .tp_vectorcall_offset = offsetof(Writer, vectorcall),                              \
    .tp_dictoffset = offsetof(Writer, dictionary), .tp_weaklistoffset = offsetof(Writer, weak_references),             \
    .tp_call = PyVectorcall_Call, .tp_repr = (reprfunc)Writer_repr, .tp_hash = (hashfunc)Writer_hash,                  \
    .tp_richcompare = Writer_compare, .tp_traverse = (traverseproc)Writer_traverse, .tp_clear = (inquiry)Writer_clear, \
    .tp_dealloc = (destructor)Writer_dealloc, .tp_methods = Writer_methods, .tp_getset = Writer_getset,                \
    .tp_getattro = Writer_getattro, .tp_setattro = Writer_setattro

static PyTypeObject MethodWriter_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "gradsan.record._native.MethodWriter",
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_descr_get = Writer_get,
    WRITER_SLOTS,
};

/* For originals that do not become methods in a class (builtin functions), so that the writer does not either. */
static PyTypeObject FunctionWriter_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "gradsan.record._native.FunctionWriter",
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    WRITER_SLOTS,
};

/* Lets `x[key] = value` call the C function directly if the original does nothing else. */
static void find_indexing(Writer *writer)
{
    if (!Py_IS_TYPE(writer->original, &PyWrapperDescr_Type))
        return;
    PyWrapperDescrObject *wrapper = (PyWrapperDescrObject *)writer->original;
    PyTypeObject *owner = PyDescr_TYPE(wrapper);
    PyMappingMethods *mapping = owner->tp_as_mapping;
    if (mapping == NULL)
        return;
    if (strcmp(wrapper->d_base->name, "__setitem__") == 0 && (void *)mapping->mp_ass_subscript == wrapper->d_wrapped)
        writer->assign = mapping->mp_ass_subscript;
    writer->indexed = owner;
}

/* New reference, not tracked yet: a wrapper of `original` without a task. */
static Writer *new_writer(Core *core, PyObject *original, vectorcallfunc call)
{
    int binds = Py_TYPE(original)->tp_descr_get != NULL;
    Writer *writer = PyObject_GC_New(Writer, binds ? &MethodWriter_Type : &FunctionWriter_Type);
    if (writer == NULL)
        return NULL;
    memset((char *)writer + sizeof(PyObject), 0, sizeof(Writer) - sizeof(PyObject));
    writer->vectorcall = call;
    writer->original = Py_NewRef(original);
    writer->position = -1;
    writer->core = (Core *)Py_NewRef((PyObject *)core);
    return writer;
}

/* The attribute of an instance for a wrapped method: for a C method a wrapper of the bound method, with that one's
 * attributes. */
static PyObject *Writer_get(PyObject *self, PyObject *instance, PyObject *owner)
{
    Writer *writer = (Writer *)self;
    if (instance == NULL || instance == Py_None)
        return Py_NewRef(self);
    if (!Py_IS_TYPE(writer->original, &PyMethodDescr_Type) ||
        (writer->vectorcall != Writer_vectorcall && writer->vectorcall != Listener_vectorcall))
        return PyMethod_New(self, instance);
    PyObject *original = Py_TYPE(writer->original)->tp_descr_get(writer->original, instance, owner);
    if (original == NULL || !PyCFunction_Check(original))
        return original;
    Writer *bound = new_writer(writer->core, original, Bound_vectorcall);
    if (bound != NULL) {
        bound->unbound = Py_NewRef(self);
        bound->dictionary = Py_BuildValue("{sOsO}", "_gradsan_original", original, "_gradsan_method", Py_None);
        PyObject_GC_Track(bound);
        if (bound->dictionary == NULL)
            Py_CLEAR(bound);
    }
    Py_DECREF(original);
    return (PyObject *)bound;
}

/* Tracks a new wrapper, and sets its attributes about its original. */
static PyObject *finished(Writer *writer)
{
    PyObject_GC_Track(writer);
    writer->dictionary = PyObject_CallOneArg(torch.marks_of, writer->original);
    if (writer->dictionary == NULL)
        Py_CLEAR(writer);
    return (PyObject *)writer;
}

static PyObject *Core_listener(Core *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    static const char *const names[] = {"original", "before", "after"};
    PyObject *given[3];
    if (take_arguments("listener", names, 3, 3, args, count, keywords, given) < 0)
        return NULL;
    for (int i = 0; i < 3; i++)
        if (!PyCallable_Check(given[i]) && (i == 0 || given[i] != Py_None)) {
            PyErr_SetString(PyExc_TypeError, "listener() needs a callable and two that may be None");
            return NULL;
        }
    Writer *writer = new_writer(self, given[0], Listener_vectorcall);
    if (writer == NULL)
        return NULL;
    writer->before = given[1] == Py_None ? NULL : Py_NewRef(given[1]);
    writer->after = given[2] == Py_None ? NULL : Py_NewRef(given[2]);
    return finished(writer);
}

static PyObject *Core_relay(Core *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    static const char *const names[] = {"original", "before", "after"};
    PyObject *given[3];
    if (take_arguments("relay", names, 3, 3, args, count, keywords, given) < 0)
        return NULL;
    Writer *writer = new_writer(self, given[0], Relay_vectorcall);
    if (writer == NULL)
        return NULL;
    writer->before = given[1] == Py_None ? NULL : Py_NewRef(given[1]);
    writer->after = Py_NewRef(given[2]);
    PyObject *relay = finished(writer);
    if (relay != NULL && PyDict_SetItemString(writer->dictionary, "_gradsan_relay", Py_True) < 0)
        Py_CLEAR(relay);
    return relay;
}

static PyObject *Core_writer(Core *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    static const char *const names[] = {"original", "op", "kind", "position", "keyword"};
    PyObject *given[5];
    if (take_arguments("writer", names, 5, 5, args, count, keywords, given) < 0)
        return NULL;
    if (!PyCallable_Check(given[0]) || !PyUnicode_Check(given[1]) || !PyUnicode_Check(given[2]) ||
        !(given[4] == Py_None || PyUnicode_Check(given[4]))) {
        PyErr_SetString(PyExc_TypeError, "writer() needs a callable, two strings, an int and a string or None");
        return NULL;
    }
    Py_ssize_t position = PyLong_AsSsize_t(given[3]);
    if (position == -1 && PyErr_Occurred())
        return NULL;
    Writer *writer = new_writer(self, given[0], Writer_vectorcall);
    if (writer == NULL)
        return NULL;
    writer->op = Py_NewRef(given[1]);
    writer->kind = Py_NewRef(given[2]);
    writer->position = position;
    writer->is_setitem = PyUnicode_CompareWithASCIIString(given[2], "setitem") == 0;
    writer->is_operator = PyUnicode_CompareWithASCIIString(given[2], "operator") == 0;
    writer->is_plain = writer->is_operator || PyUnicode_CompareWithASCIIString(given[2], "plain") == 0;
    if (given[4] != Py_None) {
        writer->keyword = Py_NewRef(given[4]);
        PyUnicode_InternInPlace(&writer->keyword);
    }
    find_indexing(writer);
    return finished(writer);
}
