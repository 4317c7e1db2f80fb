# ruff: noqa
# fmt: off
import torch


class 模型(torch.nn.Module):
	def forward(self, 输入):
		门 = torch.sigmoid(self.线性层(输入)); 门 *= 输入	# 原地相乘
		return 门
