import torch


class Layer(torch.nn.Module):
    def forward(self, x):
        return (x * 2).exp()


layer = Layer()
layer.register_backward_hook(lambda module, grad_input, grad_output: None)
layer(torch.ones(3, requires_grad=True)).sum().backward()
