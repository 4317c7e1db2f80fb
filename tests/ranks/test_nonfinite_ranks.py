"""NaN that one of two ranks makes: that rank names the line, the other says that it came from elsewhere."""

BODY = """
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(3):
    x = torch.ones(4, 3) * (0.0 if dist.get_rank() == 1 and number == 1 else 1.0)
    out = model(x) - model.module.bias
    loss = out.square().sum(1).sqrt().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_the_rank_where_it_was_made_names_the_line(run_warm):
    job = run_warm(BODY, "--nonfinite")
    (made,), (met,) = job.reports[1]["diagnoses"], job.reports[0]["diagnoses"]
    origin = next(label for label in made["labels"] if label["role"] == "origin")
    assert (made["code"], made["nonfinite"]["round"]) == ("GS602", 1)
    assert "sqrt" in origin["source"]
    assert (met["code"], met["nonfinite"]["born"], met["nonfinite"]["round"]) == ("GS605", "unknown", 1)
    assert "another rank" in met["explanation"]
