"""The search of the built site in a browser: a pasted message leads to its code's page, in the language of the page."""

from __future__ import annotations

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from example_programs import ROOT

if find_spec("material") is None or find_spec("mkdocs_static_i18n") is None:
    pytest.skip("the site is built by mkdocs (`make docs` installs it)", allow_module_level=True)

MESSAGES = {
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "[torch.FloatTensor [3]], which is output 0 of ExpBackward0, is at version 1; expected version 0 instead. Hint: "
    "enable anomaly detection to find the operation that failed to compute its gradient, with "
    "torch.autograd.set_detect_anomaly(True).": "GS101",
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad().": "GS401",
    "element 0 of tensors does not require grad and does not have a grad_fn": "GS405",
    "RuntimeError: a leaf Variable that requires grad is being used in an in-place operation.": "GS301",
    "a view of a leaf Variable that requires grad is being used in an in-place operation.": "GS301",
    "Output 0 of UnbindBackward0 is a view and is being modified inplace. This view is the output of a function that "
    "returns multiple views. Such functions do not allow the output views to be modified inplace.": "GS303",
    "grad can be implicitly created only for scalar outputs": "GS408",
    "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is "
    "the desired behavior.": "GS406",
    "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.": "GS317",
    "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment": "GS319",
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed. Its .grad attribute won't be "
    "populated during autograd.backward().": "GS409",
    "unsupported operation: more than one element of the written-to tensor refers to a single memory location. Please "
    "clone() the tensor before performing the operation.": "GS308",
    "Function 'SqrtBackward0' returned nan values in its 0th output.": "GS414",
    "Inference tensors cannot be saved for backward. To work around you can make a clone to get a normal "
    "tensor and use it in autograd.": "GS312",
    "Expected to mark a variable ready only once. This error is caused by one of the following reasons": "GS513",
    "Expected to have finished reduction in the prior iteration before starting a new one.": "GS514",
    "None of the inputs have requires_grad=True. Gradients will be None": "GS517",
    "A different number of tensors was saved during the original forward and recomputation.": "GS502",
    "result type Float can't be cast to the desired output type Long": "GS316",
    "the derivative for 'self: grid_sampler_2d_backward' is not implemented": "GS417",
    "can't retain_grad on Tensor that has requires_grad=False": "GS413",
    "Function MyFunctionBackward returned an incorrect number of gradients (expected 2, got 1)": "GS410",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("folder", ["", "zh/"], ids=["en", "zh"])
def test_a_pasted_message_leads_to_its_code(site, chromium, folder):
    handler = functools.partial(QuietHandler, directory=str(site))
    found = {}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = chromium.new_page(viewport={"width": 1300, "height": 900})
        page.goto(f"http://127.0.0.1:{server.server_port}/{folder}index.html")
        box, results = page.locator("input.md-search__input"), page.locator(".md-search-result__item")
        for message in MESSAGES:
            for words in ("", message):
                box.fill(words)
                box.focus()
                box.dispatch_event("keyup")
                page.wait_for_function(
                    "some => (document.querySelector('.md-search-result__item') !== null) === some", arg=bool(words)
                )
            links = results.locator("a").evaluate_all("all => all.map((one) => new URL(one.href).pathname)")
            assert [link for link in links if link.startswith("/zh/") != bool(folder)] == [], message
            found[message] = re.sub(r"^/(zh/)?reference/codes/(\w+)\.html$", r"\2", links[0])
        page.close()
        server.shutdown()
    assert found == MESSAGES
    assert len(set(MESSAGES.values())) >= 20


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Writes no line for each request."""

    def log_message(self, *_: object) -> None:
        pass
