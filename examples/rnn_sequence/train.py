"""Predict the next value of a long series, chunk by chunk, with the hidden state carried from chunk to chunk."""

import argparse

import torch
import torch.nn as nn
from tqdm import tqdm

from data import chunks, make_series
from model import NextStep


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", choices=["rnn", "lstm"], default="rnn")
    parser.add_argument("--hidden-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100, help="number of chunks to train on")
    parser.add_argument("--chunk", type=int, default=16, help="time steps per chunk")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--anomaly", action="store_true", help="run under torch.autograd.set_detect_anomaly(True)")
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.autograd.set_detect_anomaly(args.anomaly)

    series = make_series(args.batch_size, args.steps * args.chunk + 1, args.seed)
    model = NextStep(args.cell, args.hidden_size)
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adadelta(model.parameters())

    h_cur = model.init_hidden(args.batch_size)
    running, every = 0.0, max(1, args.steps // 5)
    with tqdm(chunks(series, args.chunk), total=args.steps, desc=args.cell) as bar:
        for step, (x, y) in enumerate(bar, start=1):
            pred, h_next = model(x, h_cur)
            loss = criterion(pred, y)

            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            optimizer.step()

            h_cur = h_next

            running += loss.item()
            if step % every == 0:
                bar.write(f"step {step}  loss {running / every:.4f}")
                running = 0.0


if __name__ == "__main__":
    main()
