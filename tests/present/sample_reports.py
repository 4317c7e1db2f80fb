"""Reports written by hand about the small programs in ``sources``, and the words they use."""

from pathlib import Path

from gradsan.model import (
    Diagnosis,
    Fix,
    Frame,
    Gradient,
    Label,
    Message,
    NamedTensor,
    Program,
    Report,
    Seen,
    Site,
    Verification,
    Why,
)

SOURCES = Path(__file__).parent / "sources"
LIBRARY = "/opt/venv/lib/python3.11/site-packages/torch"

WORDS = {
    "bridge: {what}": "连接处：{what}",
    "may have written: {what}": "可能写入：{what}",
    "needed: {what}": "需要：{what}",
    "note: {what}": "说明：{what}",
    "overwritten: {what}": "覆盖：{what}",
    "saved: {what}": "保存：{what}",
    "an update of the discriminator": "更新了判别器",
    "backward reads {op}'s result here": "backward 在此读取 {op} 的结果",
    "backward walked back into step {step} through h": "backward 经由 h 走回了第 {step} 步",
    "call d_optimizer.step() after both losses have gone backward": "两个损失都 backward 之后再调用 d_optimizer.step()",
    "collect the steps in a list and stack them": "把每一步放进列表，最后 stack",
    "cut the graph where the state is carried over": "在传递状态的地方切断计算图",
    "{name}, for the gradient of {input}": "{name}，供 {input} 的梯度使用",
    "gradients are those of truncated backpropagation through time": "梯度成为截断的时间反向传播的梯度",
    "h keeps the graph of the step before": "h 保留着上一步的计算图",
    "make a new tensor instead of writing into the saved one": "生成新的张量，不写入已保存的张量",
    "memory written through raw pointers": "经由裸指针的内存写入",
    "nothing was seen of what it does to state": "没有看到它对 state 做了什么",
    "only bytes outside of what was saved have changed": "只有保存范围以外的字节改变了",
    "record the writes in deep mode": "用 deep 模式记录写入",
    "result of {op}": "{op} 的结果",
    "the graph of this loss needs the weights as they were": "这个损失的计算图需要更新之前的权重",
    "the optimizer updated a weight between forward and backward": "forward 与 backward 之间优化器更新了权重",
    "the result of an operation was overwritten before backward needed it": "运算的结果在 backward 需要它之前被改写",
    "the saved context was overwritten before backward needed it": "保存的 context 在 backward 需要它之前被改写",
    "the saved value was not overwritten: PyTorch compares versions, not values": (
        "保存的值没有被改写：PyTorch 比较的是版本，不是数值"
    ),
    "the writes of {name} and the reads of backward lie in one buffer": "写入 {name} 和 backward 的读取在同一块内存",
    "this loss reaches back across an optimizer step": "这个损失跨过一次 optimizer step 连到了更早的计算图",
    "what wrote into {name} was not seen": "没有看到是什么写入了 {name}",
    "{op} kept {name}; then {write} wrote into the same memory": "{op} 保存了 {name}，之后 {write} 写入了同一块内存",
    "{name}, by {op}": "{name}，由 {op} 改写",
    "{op}'s gradient is computed from its result, which is gone": "{op} 的梯度由其结果算出，而结果已不在",
    "{what} updated rnn.weight_hh_l0": "{what} 更新了 rnn.weight_hh_l0",
}


def words(text, **values):
    """A message of these tests: its English words are its key."""
    assert text in WORDS
    return Message(f"sample.{text}", values)


def say_sample(message, language):
    text = message.key.removeprefix("sample.")
    values = {
        name: say_sample(value, language) if isinstance(value, Message) else value
        for name, value in message.values.items()
    }
    return (WORDS[text] if language == "zh" else text).format(**values)


def frame(file, line, marked=None, function="<module>", end=None):
    """A user frame at ``marked`` (a piece of that line), up to ``end``: (line, its last piece)."""
    path = SOURCES / file
    lines = path.read_text(encoding="utf-8").splitlines()
    if marked is None:
        return Frame(str(path), line, function, is_user=True)
    column = lines[line - 1].index(marked) + 1
    end_line, end_column = line, column + len(marked)
    if end is not None:
        end_line = end[0]
        end_column = lines[end_line - 1].index(end[1]) + len(end[1]) + 1
    return Frame(str(path), line, function, column, end_line, end_column, is_user=True)


def library(file, line, function):
    return Frame(f"{LIBRARY}/{file}", line, function)


OPENINGS = {
    "saved": "saved: {what}",
    "written": "overwritten: {what}",
    "used": "needed: {what}",
    "bridge": "bridge: {what}",
    "suspect": "may have written: {what}",
    "note": "note: {what}",
}


def label(role, where, message, callers=(), inner=(), op=None):
    return Label(role, where, words(OPENINGS[role], what=message), op, Site((*callers, where, *inner)))


def report(
    *diagnoses, seen=None, exception=("RuntimeError", "one of the variables ... modified by an inplace operation")
):
    program = Program(("train.py", "--epochs", "3"), "failed" if exception else "finished", exception)
    seen = Seen(saves=214, writes=38, backwards=3, steps=2) if seen is None else seen
    return Report(program=program, seen=seen, diagnoses=diagnoses, gradsan="0.1.0", torch="2.13.0", python="3.11.7")


def same_line():
    line = "    y = torch.sigmoid(x).mul_(2)"
    return report(
        Diagnosis(
            code="GS101",
            cause="result_overwritten",
            severity="error",
            silent=False,
            title=words("the result of an operation was overwritten before backward needed it"),
            explanation=words(
                "{op} kept {name}; then {write} wrote into the same memory", op="sigmoid", name="y", write="mul_"
            ),
            labels=(
                label("saved", frame("same_line.py", 6, "torch.sigmoid(x)"), words("result of {op}", op="sigmoid")),
                label(
                    "written",
                    frame("same_line.py", 6, "torch.sigmoid(x).mul_(2)"),
                    words("{name}, by {op}", name="y", op="mul_"),
                    op="mul_",
                ),
                label(
                    "used",
                    frame("same_line.py", 7, "y.sum().backward()"),
                    words("backward reads {op}'s result here", op="sigmoid"),
                ),
            ),
            tensor=NamedTensor("y", (4,), "float32", "cpu", "SigmoidBackward0", "result"),
            why=Why(
                "grad_self = grad * (1 - result) * result",
                words("{op}'s gradient is computed from its result, which is gone", op="sigmoid"),
            ),
            gradient=Gradient("raised"),
            fixes=(
                Fix(
                    "out_of_place",
                    "preserved",
                    words("make a new tensor instead of writing into the saved one"),
                    applicability="automatic",
                    lines=((str(SOURCES / "same_line.py"), 6, line.replace("mul_", "mul")),),
                    verification=Verification("passed", "", 0.0, 1.02, None),
                ),
            ),
        )
    )


def two_files():
    main = frame("gan.py", 31, "main()")
    in_main = frame("gan.py", 27, "train_step(", "main")
    outer = (main, in_main)
    call = library("nn/modules/module.py", 1779, "_call_impl")
    forward = frame("model.py", 10, "self.net(image.flatten(1))", "Discriminator.forward")
    first_call = frame("gan.py", 9, "discriminator(fake)", "train_step")
    return report(
        Diagnosis(
            code="GS110",
            cause="step_between_forward_and_backward",
            severity="error",
            silent=False,
            title=words("the optimizer updated a weight between forward and backward"),
            explanation=words("the graph of this loss needs the weights as they were"),
            labels=(
                label(
                    "saved",
                    forward,
                    words("{name}, for the gradient of {input}", name="discriminator.net.2.weight", input="fake"),
                    callers=(*outer, first_call, call),
                    inner=(call, library("nn/modules/linear.py", 134, "forward")),
                ),
                label(
                    "written",
                    frame("gan.py", 16, "d_optimizer.step()", "train_step"),
                    words("an update of the discriminator"),
                    callers=outer,
                    inner=(library("optim/sgd.py", 125, "step"),),
                ),
                label(
                    "used",
                    frame("gan.py", 19, "g_loss.backward()", "train_step"),
                    words("the graph of this loss needs the weights as they were"),
                    callers=outer,
                ),
            ),
            tensor=NamedTensor("discriminator.net.2.weight", (4, 1), "float32", "cuda:0", "AddmmBackward0", "mat2"),
            why=Why("grad_mat1 = grad @ mat2.T", words("the graph of this loss needs the weights as they were")),
            fixes=(
                Fix(
                    "backward_first",
                    "preserved",
                    words("call d_optimizer.step() after both losses have gone backward"),
                    lines=(
                        (str(SOURCES / "gan.py"), 16, ""),
                        (str(SOURCES / "gan.py"), 20, "    g_optimizer.step()\n    d_optimizer.step()"),
                    ),
                ),
            ),
        )
    )


def bridge():
    return report(
        Diagnosis(
            code="GS111",
            cause="state_carried_over",
            severity="error",
            silent=False,
            title=words("this loss reaches back across an optimizer step"),
            explanation=words("the graph of this loss needs the weights as they were"),
            labels=(
                label(
                    "saved",
                    frame("rnn.py", 10, "rnn(x[i], h)"),
                    words("{name}, for the gradient of {input}", name="rnn.weight_hh_l0", input="h"),
                ),
                label(
                    "written",
                    frame("rnn.py", 13, "opt.step()"),
                    words("{what} updated rnn.weight_hh_l0", what="Adadelta"),
                    op="Adadelta.step",
                ),
                label(
                    "used",
                    frame("rnn.py", 12, "loss.backward(retain_graph=True)"),
                    words("backward walked back into step {step} through h", step=0),
                ),
                label("bridge", frame("rnn.py", 14, "h = h_next"), words("h keeps the graph of the step before")),
            ),
            fixes=(
                Fix(
                    "detach_carried_state",
                    "changed",
                    words("cut the graph where the state is carried over"),
                    how_changed=words("gradients are those of truncated backpropagation through time"),
                    applicability="review",
                    lines=((str(SOURCES / "rnn.py"), 14, "    h = h_next.detach()"),),
                    verification=Verification("failed", "", 0.25),
                ),
            ),
            count=4,
        )
    )


def false_alarm():
    return report(
        Diagnosis(
            code="GS120",
            cause="false_alarm",
            severity="warning",
            silent=False,
            title=words("the saved value was not overwritten: PyTorch compares versions, not values"),
            explanation=words("only bytes outside of what was saved have changed"),
            labels=(
                label("saved", frame("halves.py", 4, "table[:4].square()"), words("result of {op}", op="table[:4]")),
                label(
                    "written",
                    frame("halves.py", 5, "table[4:] = 0.0"),
                    words("only bytes outside of what was saved have changed"),
                    op="__setitem__",
                ),
                label(
                    "used",
                    frame("halves.py", 6, "score.backward()"),
                    words("backward reads {op}'s result here", op="select"),
                ),
            ),
            gradient=Gradient("right"),
            notes=(words("the writes of {name} and the reads of backward lie in one buffer", name="table"),),
        )
    )


def unknown_writer():
    may = words("nothing was seen of what it does to state")
    return report(
        Diagnosis(
            code="GS121",
            cause="unknown_writer",
            severity="error",
            silent=True,
            title=words("what wrote into {name} was not seen", name="state"),
            explanation=words("{op}'s gradient is computed from its result, which is gone", op="exp"),
            labels=(
                label(
                    "saved",
                    frame("hidden_writer.py", 5, "torch.rand(16, requires_grad=True).exp()"),
                    words("result of {op}", op="exp"),
                ),
                label(
                    "used",
                    frame("hidden_writer.py", 10, "loss.backward()"),
                    words("backward reads {op}'s result here", op="exp"),
                ),
                label("suspect", frame("hidden_writer.py", 8, "native_kernels.clamp(state.data_ptr(), 16)"), may),
                label("suspect", frame("hidden_writer.py", 9, "rescale(state)"), may),
                label("suspect", frame("hidden_writer.py", 7, "normalize(state)"), may),
            ),
            gradient=Gradient("wrong", 0.3517),
            fixes=(Fix("deep_mode", "preserved", words("record the writes in deep mode")),),
        ),
        seen=Seen(saves=1_204_511, writes=1, backwards=1, blind_spots=(words("memory written through raw pointers"),)),
        exception=None,
    )


def in_a_loop():
    return report(
        Diagnosis(
            code="GS104",
            cause="buffer_filled_in_loop",
            severity="error",
            silent=False,
            title=words("the result of an operation was overwritten before backward needed it"),
            explanation=words("{op}'s gradient is computed from its result, which is gone", op="mul"),
            labels=(
                label("saved", frame("filled.py", 7, "history[t]"), words("result of {op}", op="history[t]")),
                label(
                    "written",
                    frame("filled.py", 7, "history[t + 1] = "),
                    words("{name}, by {op}", name="history", op="="),
                ),
                label(
                    "used",
                    frame("filled.py", 8, "history.sum().backward()"),
                    words("backward reads {op}'s result here", op="mul"),
                ),
            ),
            fixes=(
                Fix(
                    "list_and_stack",
                    "preserved",
                    words("collect the steps in a list and stack them"),
                    lines=(
                        (str(SOURCES / "filled.py"), 4, "history = [torch.ones(())]"),
                        (str(SOURCES / "filled.py"), 5, ""),
                        (str(SOURCES / "filled.py"), 7, "    history.append(history[t] * weights[t])"),
                        (str(SOURCES / "filled.py"), 8, "torch.stack(history).sum().backward()"),
                    ),
                ),
            ),
            count=63,
        )
    )


def wide_characters():
    return report(
        Diagnosis(
            code="GS101",
            cause="result_overwritten",
            severity="error",
            silent=False,
            title=words("the result of an operation was overwritten before backward needed it"),
            explanation=words("{op}'s gradient is computed from its result, which is gone", op="sigmoid"),
            labels=(
                label(
                    "saved",
                    frame("wide.py", 8, "torch.sigmoid(self.线性层(输入))", "模型.forward"),
                    words("result of {op}", op="sigmoid"),
                ),
                label(
                    "written",
                    frame("wide.py", 8, "门 *= 输入", "模型.forward"),
                    words("{name}, by {op}", name="门", op="*="),
                ),
            ),
        )
    )


def no_columns():
    return report(
        Diagnosis(
            code="GS101",
            cause="result_overwritten",
            severity="error",
            silent=False,
            title=words("the result of an operation was overwritten before backward needed it"),
            explanation=words("{op}'s gradient is computed from its result, which is gone", op="sqrt"),
            labels=(
                label("saved", frame("no_columns.py", 3), words("result of {op}", op="sqrt")),
                label("written", frame("no_columns.py", 4), words("{name}, by {op}", name="mask", op="+=")),
                label("used", frame("no_columns.py", 5), words("backward reads {op}'s result here", op="sqrt")),
                label("note", Frame("<string>", 3, "<module>", is_user=True), words("result of {op}", op="exec")),
            ),
        )
    )


def several_lines():
    return report(
        Diagnosis(
            code="GS102",
            cause="operand_overwritten",
            severity="error",
            silent=False,
            title=words("the saved context was overwritten before backward needed it"),
            explanation=words("{op}'s gradient is computed from its result, which is gone", op="bmm"),
            labels=(
                label(
                    "saved",
                    frame("several_lines.py", 8, "attention(", end=(14, ")")),
                    words("result of {op}", op="context @ weight"),
                ),
                label(
                    "written",
                    frame("several_lines.py", 15, "torch.add(", end=(16, "context)")),
                    words("{name}, by {op}", name="context", op="add(out=)"),
                ),
                label(
                    "used",
                    frame("several_lines.py", 17, "out.sum().backward()"),
                    words("backward reads {op}'s result here", op="bmm"),
                ),
            ),
        )
    )


def long_line():
    return report(
        Diagnosis(
            code="GS101",
            cause="result_overwritten",
            severity="note",
            silent=False,
            title=words("the result of an operation was overwritten before backward needed it"),
            explanation=words("{op}'s gradient is computed from its result, which is gone", op="exp"),
            labels=(
                label("saved", frame("long_line.py", 5, "torch.exp(a)"), words("result of {op}", op="exp")),
                label(
                    "written",
                    frame("long_line.py", 5, "first.add_(second.detach())"),
                    words("{name}, by {op}", name="first", op="add_"),
                ),
                label(
                    "used",
                    frame("long_line.py", 6, "third.sum().backward()"),
                    words("backward reads {op}'s result here", op="exp"),
                ),
            ),
            fixes=(
                Fix(
                    "out_of_place",
                    "preserved",
                    words("make a new tensor instead of writing into the saved one"),
                    lines=(
                        (
                            str(SOURCES / "long_line.py"),
                            5,
                            (SOURCES / "long_line.py")
                            .read_text(encoding="utf-8")
                            .splitlines()[4]
                            .replace("first.add_(second.detach())", "first = first + second.detach()"),
                        ),
                    ),
                ),
            ),
        )
    )


def nothing_found():
    return report(seen=Seen(1, 1, 1, 0), exception=None)


REPORTS = {
    make.__name__: make
    for make in (
        bridge,
        false_alarm,
        in_a_loop,
        long_line,
        no_columns,
        nothing_found,
        same_line,
        several_lines,
        two_files,
        unknown_writer,
        wide_characters,
    )
}
