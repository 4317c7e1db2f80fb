"""Candidates of single kinds, from diagnoses written by hand, and the text that they lead to."""

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from cases import each
from gradsan.model import Diagnosis, Fix, Frame, Label, Message, NamedTensor, Site
from gradsan.repair.fixes import backwards, copies, gradients, graphs, loops, states, steps, views, with_candidates
from gradsan.repair.patch import Patch


@pytest.fixture
def program(tmp_path):
    def write(text, name="program.py"):
        file = tmp_path / name
        file.write_text(textwrap.dedent(text).lstrip("\n"))
        return str(file)

    return write


def at(file, line, function="<module>", text=None):
    source = Path(file).read_text().splitlines()[line - 1]
    part = text or source.strip()
    column = source.index(part) + 1
    return Frame(file, line, function, column, line, column + len(part), is_user=True)


def diagnosis(cause, *labels, name=None, **values):
    tensor = None if name is None else NamedTensor(name, (2,), "float32", "cpu", None, None)
    said = Message("title.any", values)
    marks = tuple(Label(role, frames[-1], said, op, Site(frames)) for role, op, frames in labels)
    return Diagnosis("GS000", cause, "error", False, said, said, marks, tensor=tensor)


def patched(suggested, file):
    patch = Patch()
    return [patch.with_lines(fix.lines).files[file].decode() for fix in suggested]


@each("in_loop", [True, False])
def test_a_gradient_that_a_hook_takes_from_a_loop_is_not_returned_alone(program, in_loop):
    loop = "    for gradient in given:\n        gradient.clamp_(0)\n"
    file = program(
        f"def hook(layer, given, taken):\n{loop}" if in_loop else "def hook(gradient):\n    gradient.clamp_(0)\n"
    )
    last = 3 if in_loop else 2
    label = ("written", "clamp_", (at(file, last, "hook", "gradient.clamp_(0)"),))
    advised = replace(diagnosis("gradient_overwritten", label), fixes=(Fix.worded("help.return_new_gradient", {}),))
    found = patched(gradients.return_new_gradient(advised), file)
    assert [text.count("return gradient") for text in found] == ([] if in_loop else [1, 1])


@pytest.mark.parametrize(
    ("bound", "collected", "kind"),
    [
        ("pass", "path.append(y)", "collect_each_value"),
        ("pass", "path.append(y.clone())", "out_of_place"),
        # Another tensor in every round.
        ("y = f(x)", "path.append(y)", "out_of_place"),
    ],
)
def test_one_tensor_collected_in_every_round_is_several_afterwards(program, bound, collected, kind):
    file = program(f"for _ in range(3):\n    {bound}\n    y += g(y)\n    {collected}\n")
    fault = diagnosis("operand_overwritten", ("written", "add_", (at(file, 3),)), name="y")
    new = Fix("out_of_place", "preserved", fault.title, lines=((file, 3, "    y = y + g(y)"),))
    (found,) = copies.collect_each_value(fault, (new,))
    assert (found.kind, found.lines) == (kind, new.lines)


@pytest.mark.parametrize(
    ("line", "op", "extra", "is_hoisted"),
    [
        ("mem[t] = mem[t] * 0.5", "__setitem__", "pass", True),
        ("mem *= 2", "mul_", "pass", True),
        # Another tensor in every round: a copy of the first would do nothing.
        ("mem[t] = 0", "__setitem__", "mem = net(x)", False),
    ],
)
def test_one_copy_before_the_loop_in_the_place_of_one_in_each_round(program, line, op, extra, is_hoisted):
    before = "for epoch in range(3):\n    mem = net(x)\n"
    loop = f"    for t in range(6):\n        {extra}\n        {line}\n"
    file = program(before + loop)
    fault = diagnosis("operand_overwritten", ("written", op, (at(file, 5, text=line.partition(" = ")[0]),)), name="mem")
    copy = Fix(
        "clone_before_mutation", "preserved", fault.title, lines=((file, 5, f"        mem = mem.clone()\n{line}"),)
    )
    found = copies.clone_before_loop(replace(fault, fixes=(copy,)))
    assert patched(found, file) == ([f"{before}    mem = mem.clone()\n{loop}"] if is_hoisted else [])
    assert copies.clone_before_loop(fault) == ()
    # Where both pass, the one that is made once comes first.
    assert with_candidates(replace(fault, fixes=(copy,))).fixes[0] == (found[0] if is_hoisted else copy)


def test_a_loss_of_a_closure_is_computed_in_it(program):
    file = program("""
        loss = model(x)


        def closure():
            "What L-BFGS asks for."
            loss.backward()
            return loss


        optimizer.step(closure)
    """)
    found = graphs.rebuild_in_loop(
        diagnosis(
            "step_between_forward_and_backward",
            ("saved", None, (at(file, 1),)),
            ("used", None, (at(file, 10), at(file, 6, "closure"))),
        )
    )
    (text,) = patched(found, file)
    assert text == (
        "\n\ndef closure():\n"
        '    "What L-BFGS asks for."\n'
        "    loss = model(x)\n    loss.backward()\n    return loss\n\n\n"
        "optimizer.step(closure)\n"
    )


def test_values_read_elsewhere_stay(program):
    file = program("""
        loss = model(x)

        def closure():
            loss.backward()
            return loss

        optimizer.step(closure)
        print(loss)
    """)
    found = graphs.rebuild_in_loop(
        diagnosis(
            "step_between_forward_and_backward",
            ("saved", None, (at(file, 1),)),
            ("used", None, (at(file, 7), at(file, 4, "closure"))),
        )
    )
    (text,) = patched(found, file)
    assert text.startswith("loss = model(x)\n\ndef closure():\n    loss = model(x)\n")


@pytest.mark.parametrize(
    ("head", "write", "name", "new_head", "bound"),
    [
        ("for row in x:", "row.mul_(2)", "row", "for index, row in enumerate(x):", "row = x[index]"),
        (
            "for row, k in zip(x.unbind(1), n):",
            "row[0] = k",
            "row",
            "for index, (row, k) in enumerate(zip(x.unbind(1), n)):",
            "row = x.select(1, index)",
        ),
        (
            "for i, row in enumerate(torch.unbind(self.x)):",
            "row += i",
            "row",
            "for i, row in enumerate(torch.unbind(self.x)):",
            "row = self.x[i]",
        ),
    ],
)
def test_views_are_taken_by_index(program, head, write, name, new_head, bound):
    file = program(f"{head}\n    {write}\n")
    found = views.index_views(diagnosis("one_of_several_views_written", ("written", None, (at(file, 2),)), name=name))
    assert patched(found, file) == [f"{new_head}\n    {bound}\n    {write}\n"]


@pytest.mark.parametrize("head", ["for row in make():", "for row in x.split(2):", "for other in x:"])
def test_views_are_left_alone_where_an_index_would_not_say_the_same(program, head):
    file = program(f"{head}\n    row.mul_(2)\n")
    wanted = diagnosis("one_of_several_views_written", ("written", None, (at(file, 2),)), name="row")
    assert views.index_views(wanted) == ()


def test_a_view_leaves_the_block_without_autograd(program):
    file = program("""
        with torch.no_grad():
            start = int(x.argmax())
            part = x[start:]
        part.mul_(2)
    """)
    found = views.record_view(diagnosis("unrecorded_view_written", ("created", None, (at(file, 3),))))
    assert patched(found, file) == [
        "with torch.no_grad():\n    start = int(x.argmax())\npart = x[start:]\npart.mul_(2)\n"
    ]


def test_a_view_that_the_block_reads_is_recorded_where_it_stands(program):
    file = program("""
        with torch.no_grad():
            part = x[1:]
            start = int(part.argmax())
        part.mul_(2)
    """)
    found = views.record_view(diagnosis("unrecorded_view_written", ("created", None, (at(file, 2),))))
    assert patched(found, file) == [
        "with torch.no_grad():\n    with torch.enable_grad():\n        part = x[1:]\n"
        "    start = int(part.argmax())\npart.mul_(2)\n"
    ]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("part = x[1:]", "part = x[1:]\n"),
        (
            "part = x[1:]\n        start = int(part.argmax())",
            "with torch.inference_mode():\n    with torch.inference_mode(False):\n        part = x[1:]\n"
            "    start = int(part.argmax())\n",
        ),
        (
            "# the end\n        part = x[1:]",
            "with torch.inference_mode():\n    # the end\n"
            "    with torch.inference_mode(False):\n        part = x[1:]\n",
        ),
    ],
)
def test_a_view_made_in_inference_mode_is_recorded(program, block, expected):
    file = program(f"""
        with torch.inference_mode():
            {block.replace(chr(10), chr(10) + "    ")}
        part.mul_(2)
    """)
    line = 3 if block.startswith("#") else 2
    found = views.record_view(diagnosis("unrecorded_view_written", ("created", None, (at(file, line),))))
    assert patched(found, file) == [expected + "part.mul_(2)\n"]


def test_the_function_that_returned_a_view_records(program, tmp_path):
    file = program("""
        from parts import first, last
        part = first(x)
        rest = last(x)
        part.mul_(2)
    """)
    parts = tmp_path / "parts.py"
    parts.write_text("""import torch

@torch.no_grad()
def first(x):
    return x[:1]

@cached
@torch.inference_mode
def last(x):
    return x[-1:]
""")
    for line, gone in ((2, "@torch.no_grad()\n"), (3, "@torch.inference_mode\n")):
        found = views.record_view(diagnosis("unrecorded_view_written", ("created", None, (at(file, line),))))
        assert patched(found, str(parts)) == [parts.read_text().replace(gone, "")]


def test_views_come_after_the_write_to_their_base(program):
    file = program("""
        left, right = x.unbind(1)
        x.mul_(0.5)
        y = left - right
    """)
    labels = (("created", None, (at(file, 1),)), ("written", "mul_", (at(file, 2),)))
    found = views.views_after_write(diagnosis("view_base_written", *labels))
    assert patched(found, file) == [
        "x.mul_(0.5)\nleft, right = x.unbind(1)\ny = left - right\n",
        "x = x.mul(0.5)\nleft, right = x.unbind(1)\ny = left - right\n",
        "left, right = x.unbind(1)\nx = x.mul(0.5)\ny = left - right\n",
    ]
    assert [fix.kind for fix in found] == ["view_after_write", "out_of_place", "out_of_place"]


def test_views_that_are_read_before_the_write_stay(program):
    file = program("""
        left, right = x.unbind(1)
        print(left)
        x.mul_(0.5)
    """)
    labels = (("created", None, (at(file, 1),)), ("written", "mul_", (at(file, 3),)))
    found = views.views_after_write(diagnosis("view_base_written", *labels))
    assert patched(found, file) == [
        "left, right = x.unbind(1)\nprint(left)\nx = x.mul(0.5)\nleft, right = x.unbind(1)\n",
        "left, right = x.unbind(1)\nprint(left)\nx = x.mul(0.5)\n",
    ]


NEURON = """
    class Neuron(nn.Module):
        def __init__(self):
            self.v = None

        def reset(self):
            self.v = None

        def decay(self):
            self.v = self.v * 0.5

        def forward(self, x):
            self.v = x if self.v is None else self.v + x
            return self.v
"""


def test_states_kept_in_modules_are_cut_or_forgotten_by_the_loop(program):
    neurons = program(NEURON, "neurons.py")
    main = program("""
        from neurons import Neuron
        net = nn.Sequential(nn.Linear(2, 2), Neuron())
        for x in data:
            loss = sum(net(x) for _ in range(4)).mean()
            loss.backward()
            optimizer.step()
    """)
    inside = at(neurons, 12, "Neuron.forward")
    found = states.state_in_module(
        diagnosis(
            "freed_state_carried_over",
            ("bridge", None, (at(main, 4, text="sum(net(x) for _ in range(4))"), inside)),
            ("note", None, (at(main, 6),)),
            ("used", None, (at(main, 5),)),
        )
    )
    cut, forgotten = patched(found, main)
    assert cut.splitlines()[6:] == [
        "    for module in net.modules():",
        "        if isinstance(module, Neuron) and module.v is not None:",
        "            module.v = module.v.detach()",
    ]
    # decay() forgets nothing: what it binds is made of the state.
    assert forgotten.splitlines()[3:7] == [
        "    for module in net.modules():",
        "        if isinstance(module, Neuron):",
        "            module.reset()",
        "    loss = sum(net(x) for _ in range(4)).mean()",
    ]
    assert [fix.kind for fix in found] == ["detach_carried_state", "reset_state"]


@each(
    ("made", "named"),
    [
        ("class Net(nn.Module):\n    def __init__(self):\n        self.cell = Neuron()\nnet = Net()\n", "net.cell"),
        ("net = Neuron()\n", "net"),
        # Another module of the class, or one in a container.
        (
            "class Net(nn.Module):\n    def __init__(self):\n        self.cell = Neuron()\nnet, old = Net(), Net()\n",
            None,
        ),
        ("class Net(nn.Module):\n    def __init__(self):\n        self.cells = [Neuron()]\nnet = Net()\n", None),
    ],
)
def test_the_only_module_that_keeps_a_state_is_named(program, made, named):
    neurons = program(NEURON, "neurons.py")
    text = f"from neurons import Neuron\n{made}for x in data:\n    loss = net(x).mean()\n    loss.backward()\n"
    main = program(text)
    last = text.count("\n")
    bridge = (at(main, last - 1, text="net(x)"), at(neurons, 12, "Neuron.forward"))
    found = states.state_in_module(
        diagnosis("freed_state_carried_over", ("bridge", None, bridge), ("used", None, (at(main, last),)))
    )
    cut, forgotten = patched(found, main)
    assert (f"    {named}.v = {named}.v.detach()\n" in cut) == (named is not None)
    assert (f"    {named}.reset()\n" in forgotten) == (named is not None)
    assert ("modules()" in cut) == (named is None)


def test_an_update_by_hand_moves_behind_the_loop(program):
    file = program("""
        first, second = losses(w)
        for loss in (first, second):
            loss.backward(retain_graph=True)
            with torch.no_grad():
                w -= 0.1 * w.grad
            w.grad = None
    """)
    found = loops.step_after_loop(
        diagnosis(
            "step_between_forward_and_backward",
            ("saved", None, (at(file, 1),)),
            ("written", None, (at(file, 5),)),
            ("used", None, (at(file, 3),)),
        )
    )
    assert patched(found, file) == [
        "first, second = losses(w)\nfor loss in (first, second):\n    loss.backward(retain_graph=True)\n"
        "with torch.no_grad():\n    w -= 0.1 * w.grad\nw.grad = None\n"
    ]


@pytest.mark.parametrize("update", ["w -= 0.1 * loss.item() * w.grad", "w -= rate * w.grad"])
def test_an_update_that_belongs_to_its_round_stays(program, update):
    file = program(f"""
        first, second = losses(w)
        for loss in (first, second):
            loss.backward(retain_graph=True)
            rate = schedule()
            with torch.no_grad():
                {update}
    """)
    labels = (("saved", None, (at(file, 1),)), ("written", None, (at(file, 6),)), ("used", None, (at(file, 3),)))
    assert loops.step_after_loop(diagnosis("step_between_forward_and_backward", *labels)) == ()


def test_a_loss_of_a_network_with_a_capital_name_is_computed_again(program):
    file = program("""
        D = Discriminator()
        score = D(fake)
        first, second = score.mean(), score.exp().mean()
        optimizer.step()
        second.backward()
    """)
    labels = (("saved", None, (at(file, 2),)), ("written", None, (at(file, 4),)), ("used", None, (at(file, 5),)))
    found = graphs.recompute_forward(diagnosis("step_between_forward_and_backward", *labels))
    texts = patched(found, file)
    assert texts[0].splitlines()[4:6] == ["score = D(fake)", "second = score.exp().mean()"]
    # The class is called once.
    assert all(text.count("Discriminator()") == 1 for text in texts)


@pytest.mark.parametrize("net", ["policy", "self.policy"])
def test_a_step_does_not_wait_for_rounds_that_compute_anew(program, net):
    file = program(f"""
        old = log_prob({net}(states), actions)
        for states, actions in batches:
            ratio = (log_prob({net}(states), actions) - old).exp()
            ratio.mean().backward(retain_graph=True)
            optimizer.step()
    """)
    labels = (("saved", None, (at(file, 1),)), ("written", None, (at(file, 5),)), ("used", None, (at(file, 4),)))
    cause = "step_between_forward_and_backward"
    assert loops.step_after_loop(diagnosis(cause, *labels, name="log_std"))
    assert loops.step_after_loop(diagnosis(cause, *labels, name="policy.weight")) == ()


@pytest.mark.parametrize(
    ("made", "is_repeated"),
    [("made = net(code)", True), ("made = net(code, made)", False), ("made = net(torch.randn(3))", False)],
)
def test_what_an_earlier_loop_has_made_is_repeated_unless_it_is_a_state_or_drawn(program, made, is_repeated):
    file = program(f"""
        for _ in range(2):
            {made}
        for _ in range(3):
            loss = critic(made)
            loss.backward(retain_graph=True)
            optimizer.step()
    """)
    labels = (("saved", None, (at(file, 2),)), ("written", None, (at(file, 6),)), ("used", None, (at(file, 5),)))
    found = loops.compute_in_own_loop(diagnosis("step_between_forward_and_backward", *labels))
    assert [text.splitlines()[3] for text in patched(found, file)] == ([f"    {made}"] if is_repeated else [])


@pytest.mark.parametrize(
    ("between", "is_merged"),
    [
        ("a_opt.step()\nb_opt.zero_grad()", True),
        ("clip_grad_norm_(a.parameters(), 1.0)\na_opt.step()\nb_opt.zero_grad()", True),
        # The second backward's gradients of b are not clipped.
        ("clip_grad_norm_(params, 1.0)\na_opt.step()\nb_opt.zero_grad()", False),
        # Those of b add up.
        ("a_opt.step()", False),
        # The same optimizer steps again.
        ("b_opt.step()\nb_opt.zero_grad()", False),
        ("a_opt.step()\nloss = more(loss)\nb_opt.zero_grad()", False),
        ("a_opt.step()\nlog(b.weight.grad)\nb_opt.zero_grad()", False),
    ],
)
@pytest.mark.parametrize("is_after_another", [False, True])
def test_one_backward_of_a_loss_for_two_optimizers(program, between, is_merged, is_after_another):
    made = "a_opt, b_opt = Adam(a.parameters()), Adam(b.parameters())\n"
    made += "penalty.backward()\n" if is_after_another else ""
    file = program(f"{made}loss.backward(retain_graph=True)\n{between}\nloss.backward()\nb_opt.step()\n")
    lines = Path(file).read_text().splitlines()
    labels = [
        ("written", "Adam.step", (at(file, 1 + next(n for n, one in enumerate(lines) if "step()" in one)),)),
        ("used", None, (at(file, len(lines) - 1),)),
    ]
    found = backwards.one_backward(diagnosis("step_between_forward_and_backward", *labels))
    rest = [one for one in between.split("\n") if one != "b_opt.zero_grad()"]
    wanted = "\n".join([lines[0], "b_opt.zero_grad()", "loss.backward()", *rest, "b_opt.step()", ""])
    assert patched(found, file) == ([wanted] if is_merged and not is_after_another else [])


@pytest.mark.parametrize(
    ("step", "behind", "backward", "moved"),
    [
        ("opt_d.step()", "", "g_loss.backward({})", ("opt_d.step()", "")),
        ("opt_d.step()", "", "self.manual_backward(g_loss{})", ("opt_d.step()", "")),
        ("opt_d.step()", "decay.step()", "g_loss.backward({})", ("opt_d.step()", "decay.step()")),
        ("scaler.step(opt_d)", "", "scaler.scale(g_loss).backward({})", ("scaler.step(opt_d)", "")),
        # One update, behind the last step: the scale may change there.
        ("scaler.step(opt_d)", "scaler.update()", "scaler.scale(g_loss).backward({})", ("scaler.step(opt_d)", "")),
    ],
)
def test_a_step_waits_for_the_backward_with_what_belongs_to_it(program, step, behind, backward, moved):
    head = """
        gen, dis = Linear(2, 3), Linear(3, 1)
        opt_g, opt_d = Adam(gen.parameters()), Adam(dis.parameters())
        decay = StepLR(opt_d, 5)
    """
    later = "scaler.step(opt_g)\nscaler.update()\n" if "scaler" in step else "opt_g.step()\n"
    head = textwrap.dedent(head).lstrip("\n")
    file = program(head + "\n".join(filter(None, (step, behind, backward.format("")))) + "\n" + later)
    line = 6 if behind else 5
    found = steps.reorder_step(
        diagnosis(
            "step_between_forward_and_backward",
            ("written", "Adam.step", (at(file, 4),)),
            ("used", "backward", (at(file, line),)),
        )
    )
    inputs = "inputs=list(gen.parameters())"
    restricted = backward.format(f", {inputs}" if "(g_loss{" in backward else inputs)
    assert patched(found, file)[0] == head + "\n".join(filter(None, (restricted, *moved))) + "\n" + later


def test_a_scaled_step_stays_where_nothing_updates_the_scale_later(program):
    file = program("""
        opt_g, opt_d = Adam(gen.parameters()), Adam(dis.parameters())
        scaler.step(opt_d)
        scaler.update()
        scaler.scale(g_loss).backward()
        scaler.step(opt_g)
    """)
    place = ("written", "Adam.step", (at(file, 2),)), ("used", "backward", (at(file, 4),))
    assert not steps.reorder_step(diagnosis("step_between_forward_and_backward", *place))


def test_what_scales_inputs_is_no_scaler_of_losses(program):
    file = program("""
        gen, dis = Linear(2, 3), Linear(3, 1)
        opt_g, opt_d = Adam(gen.parameters()), Adam(dis.parameters())
        opt_d.step()
        norm.update(norm.scale(x))
        g_loss.backward()
        opt_g.step()
    """)
    place = ("written", "Adam.step", (at(file, 3),)), ("used", "backward", (at(file, 5),))
    found = patched(steps.reorder_step(diagnosis("step_between_forward_and_backward", *place)), file)[0]
    assert found.endswith(
        "norm.update(norm.scale(x))\ng_loss.backward(inputs=list(gen.parameters()))\nopt_d.step()\nopt_g.step()\n"
    )
