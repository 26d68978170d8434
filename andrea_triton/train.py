"""Train a small ANDREA on real text: `python -m andrea_triton.train`.

Without options it learns the sources of Python's standard library, byte by byte, on the CPU. The folder of a run holds log.csv,
loss.png, model.safetensors (for `Andrea.load`) and checkpoint.safetensors. The same command again continues from the checkpoint,
bit for bit as if it had not stopped: what is random in a step comes from the seed and the step's number alone.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn

from .errors import AndreaError, ShapeError
from .nn.andrea import Andrea, AndreaConfig
from .nn.data import ByteTokenizer, Corpus, FileTokenizer, Tokenizer, even_windows, random_windows, read_corpus
from .nn.generate import generate
from .nn.weights import load_tensors, needed, replacing, save_tensors

BETAS = (0.9, 0.95)
LOWEST_RATE = 0.1  # of the largest, at the end
COLUMNS = ("step", "tokens", "rate", "loss", "bits_per_byte", "validation_bits_per_byte")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Options:
    """What a run does; the fields are the command's options, `help` in OPTION_HELP."""

    text: str | None = None
    tokenizer: str | None = None
    out: str = "andrea-run"
    d_model: int = 128
    n_head: int = 4
    n_layer: int = 3
    context: int = 128
    positions: str = "learned"
    dropout: float = 0.0
    batch: int = 8
    accumulate: int = 1
    steps: int = 4000
    rate: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0
    dtype: str = "float32"
    backend: str | None = None
    device: str = "cpu"
    seed: int = 0
    evaluate_every: int = 200
    save_every: int = 100
    validation_windows: int = 64
    sample_tokens: int = 200
    fresh: bool = False


OPTION_HELP = {
    "text": "a UTF-8 text to learn (default: the standard library's sources)",
    "tokenizer": "a tokenizer.json (default: bytes)",
    "out": "folder of the run",
    "d_model": "width",
    "n_head": "attention heads",
    "n_layer": "blocks",
    "context": "tokens of a sequence",
    "positions": "learned or rotary",
    "dropout": "probability that a value is dropped in training",
    "batch": "sequences in one pass",
    "accumulate": "passes in one step",
    "steps": "steps of the optimizer",
    "rate": "largest learning rate",
    "warmup": "steps in which the rate rises",
    "weight_decay": "of the matrices in the blocks and the head",
    "clip": "largest norm of the gradient",
    "dtype": "float32, or bfloat16 for autocast",
    "backend": "of the attention: triton, interpreter, torch, reference or naive (default: by device)",
    "device": "cpu, cuda, xpu ...",
    "seed": "of weights, batches and dropout",
    "evaluate_every": "steps between two validations",
    "save_every": "steps between two checkpoints",
    "validation_windows": "sequences of a validation",
    "sample_tokens": "tokens of a sample printed at the end",
    "fresh": "begin anew, whatever the folder holds",
}
CHOICES = {"dtype": tuple(DTYPES), "positions": ("learned", "rotary")}
# Options that may change between the parts of one run.
FREE = {"text", "tokenizer", "out", "device", "evaluate_every", "save_every", "sample_tokens", "fresh"}


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Options from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m andrea_triton.train", description="Train a small ANDREA on text, and continue where a run stopped."
    )
    for field in fields(Options):
        flag, default = f"--{field.name.replace('_', '-')}", field.default
        text = OPTION_HELP[field.name] + ("" if default in (None, False) else f" (default: {default})")
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", help=text)
        else:
            kind = str if default is None else type(default)
            parser.add_argument(flag, type=kind, default=default, help=text, choices=CHOICES.get(field.name))
    options = Options(**vars(parser.parse_args(arguments)))
    for name in ("batch", "accumulate", "steps", "evaluate_every", "save_every", "validation_windows"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; wanted at least 1")
    return options


def rate_at(step: int, options: Options) -> float:
    """Learning rate of a step: a linear rise, then half a cosine down to LOWEST_RATE of the largest.

    Example:
        >>> options = Options(steps=300, warmup=100, rate=1.0)
        >>> [round(rate_at(step, options), 3) for step in (0, 99, 100, 200, 300)]
        [0.01, 1.0, 1.0, 0.55, 0.1]
    """
    if step < options.warmup:
        return options.rate * (step + 1) / options.warmup
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.rate * (LOWEST_RATE + (1 - LOWEST_RATE) * 0.5 * (1 + math.cos(math.pi * done)))


def make_optimizer(model: Andrea, options: Options) -> torch.optim.AdamW:
    """AdamW; only the matrices of linear layers decay."""
    matrices = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    groups = [
        {"params": [p for n, p in model.named_parameters() if (n in matrices) == decays], "weight_decay": decay}
        for decays, decay in ((True, options.weight_decay), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=options.rate, betas=BETAS, fused=True)


class Run:
    """A model, its optimizer and how far they are.

    Args:
        options: of the run.
        corpus: what it learns.
    """

    def __init__(self, options: Options, corpus: Corpus) -> None:
        self.options, self.corpus, self.step = options, corpus, 0
        self.device, self.folder = torch.device(options.device), Path(options.out)
        config = AndreaConfig(
            corpus.vocab_size,
            options.d_model,
            options.n_head,
            options.n_layer,
            options.context,
            positions="rotary" if options.positions == "rotary" else "learned",
            dropout=options.dropout,
        )
        torch.manual_seed(options.seed)
        self.model = Andrea(config, backend=options.backend).to(self.device)
        self.optimizer = make_optimizer(self.model, options)
        self.fingerprint = hashlib.sha256(corpus.train.numpy().tobytes()).hexdigest()

    @property
    def checkpoint(self) -> Path:
        """The file that a killed run continues from."""
        return self.folder / "checkpoint.safetensors"

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean negative log likelihood of a token, in nats."""
        autocast = torch.autocast(self.device.type, DTYPES[self.options.dtype], enabled=self.options.dtype != "float32")
        with autocast:
            logits = self.model(inputs.to(self.device))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.to(self.device).flatten())

    def advance(self) -> dict[str, float]:
        """One step of the optimizer; returns its row of the log."""
        o, seed = self.options, self.options.seed * 2**40 + self.step * self.options.accumulate
        torch.manual_seed(seed)  # of the dropout
        rate = rate_at(self.step, o)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        total = 0.0
        for turn in range(o.accumulate):
            loss = self.loss(*random_windows(self.corpus.train, o.batch, o.context, seed + turn)) / o.accumulate
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), o.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        if not math.isfinite(total):
            raise AndreaError(f"the loss is {total} at step {self.step}; wanted a finite one; try a smaller --rate")
        tokens = self.step * o.accumulate * o.batch * o.context
        return {"step": self.step, "tokens": tokens, "rate": rate, "loss": total, "bits_per_byte": self.bits(total)}

    def bits(self, loss: float) -> float:
        """Bits per byte of text, from nats per token."""
        return loss / math.log(2) / self.corpus.bytes_per_token

    @torch.no_grad()
    def validate(self) -> float:
        """Bits per byte on the validation text."""
        self.model.eval()
        o, losses = self.options, []
        inputs, targets = even_windows(self.corpus.validation, o.validation_windows, o.context)
        for x, y in zip(inputs.split(o.batch), targets.split(o.batch), strict=True):
            losses.append(self.loss(x, y).item() * len(x))
        self.model.train()
        return self.bits(sum(losses) / len(inputs))

    def save(self) -> None:
        """Write the checkpoint, and the model alone; each file is replaced whole."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for parameter, entries in self.optimizer.state.items():
            tensors |= {f"optimizer.{names[parameter]}.{key}": value for key, value in entries.items()}
        state = {"step": self.step, "options": asdict(self.options), "corpus": self.fingerprint}
        save_tensors(self.checkpoint, tensors, {"train": json.dumps(state)})
        self.model.save(self.folder / "model.safetensors")

    def restore(self) -> None:
        """Continue from the checkpoint.

        Raises:
            ShapeError: it is corrupt, or was made with other options or another text.
        """
        tensors, notes = load_tensors(self.checkpoint)
        self._check_origin(json.loads(notes.get("train", "{}")))
        weights = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
        optimizer = {n.removeprefix("optimizer."): t for n, t in tensors.items() if n.startswith("optimizer.")}
        self.model.take_weights(weights, self.checkpoint)
        self.model.to(self.device)
        self.optimizer = make_optimizer(self.model, self.options)
        for name, parameter in self.model.named_parameters():
            for key in ("step", "exp_avg", "exp_avg_sq"):
                self.optimizer.state[parameter][key] = optimizer[f"{name}.{key}"].to(self.device)
        self.step = json.loads(notes["train"])["step"]

    def _check_origin(self, state: dict[str, object]) -> None:
        made, now = state.get("options"), asdict(self.options)
        if not isinstance(made, dict) or made.keys() != now.keys():
            raise ShapeError(f"{self.checkpoint} is no checkpoint of this program; use another --out, or --fresh")
        other = sorted(name for name in now.keys() - FREE if made[name] != now[name])
        if other:
            got = ", ".join(f"--{name.replace('_', '-')} {made[name]}" for name in other)
            raise ShapeError(f"{self.checkpoint} was made with {got}; use the same, another --out, or --fresh")
        if state.get("corpus") != self.fingerprint:
            raise ShapeError(
                f"{self.checkpoint} was made from another text than {self.corpus.name}; use another --out, or --fresh"
            )


class Log:
    """log.csv of a run, and its plot.

    Args:
        folder: of the run.
        step: rows after it are dropped, as the run makes them again.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.path, self.plot_path = folder / "log.csv", folder / "loss.png"
        rows = [row for row in self.rows() if int(row["step"]) <= step] if step else []
        with replacing(self.path) as new, new.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    def rows(self) -> list[dict[str, str]]:
        """The whole rows; a killed run may have left half of one."""
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            whole = [row for row in csv.DictReader(file) if None not in row.values() and None not in row]
        return [row for row in whole if row["step"].isdigit()]

    def add(self, row: dict[str, float]) -> None:
        """Append a row."""
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n").writerow(row)

    def plot(self, title: str) -> None:
        """Draw bits per byte against tokens, of the training and of the validation."""
        rows = self.rows()
        figure = needed("matplotlib.figure", "the loss plot").Figure(figsize=(7.2, 4.4), layout="constrained")
        axes = figure.subplots()
        tokens, bits = [int(row["tokens"]) for row in rows], [float(row["bits_per_byte"]) for row in rows]
        axes.plot(tokens, bits, color="#94a3b8", linewidth=0.8, label="training, each step")
        judged = [(int(r["tokens"]), float(r["validation_bits_per_byte"])) for r in rows if r["validation_bits_per_byte"]]
        if judged:
            axes.plot(*zip(*judged, strict=True), "o-", color="#1d4ed8", label=f"validation: {judged[-1][1]:.3f} at the end")
        axes.set(xlabel="tokens seen", ylabel="bits per byte", ylim=(0, None))
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(True, linewidth=0.4)
        axes.legend(frameon=False)
        with replacing(self.plot_path) as new:
            figure.savefig(new, dpi=150, format="png")


def train(run: Run, log: Log) -> None:
    """All steps that are left."""
    options, tqdm = run.options, needed("tqdm", "training").tqdm
    per_step, begun, first = options.accumulate * options.batch * options.context, time.perf_counter(), run.step
    with tqdm(total=options.steps, initial=run.step, unit="step", dynamic_ncols=True, mininterval=0.5) as bar:
        while run.step < options.steps:
            row = run.advance()
            done = run.step == options.steps
            if done or run.step % options.evaluate_every == 0:
                row["validation_bits_per_byte"] = run.validate()
                bar.write(f"step {run.step}: {row['validation_bits_per_byte']:.3f} bits per byte on the validation text")
            log.add(row)
            if done or run.step % options.save_every == 0:
                run.save()
            speed = (run.step - first) * per_step / (time.perf_counter() - begun)
            bar.set_postfix_str(f"loss {row['loss']:.3f}, {speed:,.0f} tokens/s", refresh=False)
            bar.update()


def print_samples(run: Run, tokenizer: Tokenizer) -> None:
    """Two continuations of the validation text's beginning."""
    start = run.corpus.validation[: max(1, run.options.context // 8)].tolist()
    most = min(run.options.sample_tokens, run.options.context - len(start))
    for number in range(2 if most else 0):
        result = generate(run.model, start, most, temperature=0.8, top_p=0.95, seed=number)
        print(f"--- sample {number + 1} ---\n{tokenizer.decode(start)}|{tokenizer.decode(result.new[0])}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = parse(arguments)
    try:
        for module in ("safetensors", "tqdm", "matplotlib"):
            needed(module, "training")
        tokenizer: Tokenizer = ByteTokenizer() if options.tokenizer is None else FileTokenizer(options.tokenizer)
        corpus = read_corpus(options.text, tokenizer, options.context)
        run = Run(options, corpus)
        if run.checkpoint.exists() and not options.fresh:
            run.restore()
            print(f"continuing after step {run.step} of {options.steps}: {run.checkpoint}")
        title = f"ANDREA of {run.model.config.n_parameters:,} parameters on {corpus.name}"
        print(f"{title}: {len(corpus.train):,} tokens to learn, {len(corpus.validation):,} for validation")
        log = Log(run.folder, run.step)
        train(run, log)
        log.plot(title)
        print_samples(run, tokenizer)
    except (AndreaError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; the same command continues from the last checkpoint", file=sys.stderr)
        return 130
    judged = [row["validation_bits_per_byte"] for row in log.rows() if row["validation_bits_per_byte"]]
    print(f"done: {float(judged[-1]):.3f} bits per byte on the validation text; log, plot and model are in {run.folder}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
