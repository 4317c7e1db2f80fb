import torch


def inner_step(x, y, model, optimizer, criterion):
    loss = criterion(model(x), y)
    loss.backward(create_graph=True)
    optimizer.step()
    return loss, len(x)


def task(inner, outer, model, optimizer, criterion):
    for x, y in inner:
        loss, size = inner_step(x, y, model, optimizer, criterion)
        print(loss.item(), size)
        for p in model.parameters():
            p.grad = None
    for x, y in outer:
        batch_loss = criterion(model(x), y)
        loss += batch_loss
        print(batch_loss.item())
    return loss, torch.is_grad_enabled()
