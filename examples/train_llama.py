"""Train a small Hugging Face Llama on real text over pipeline ranks, or unpartitioned.

    pip install -c constraints.txt -e '.[examples]'                        # transformers
    torchrun --nproc-per-node 4 examples/train_llama.py --steps 3 --json   # a process per rank
    python examples/train_llama.py --ranks 4 --steps 3 --json              # all in one process
    python examples/train_llama.py --reference --steps 3 --json            # plain transformers

All print the same losses and the same hash over all gradients, whatever --hint, --chunks and
--delay-seed are. With --tied the embedding is also the head; its gradient is then summed in
another order than autograd's, so losses agree to 1e-5 and hashes differ. Nothing is downloaded.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from gpt import VOCABULARY
from torch import nn
from training import Recipe, grid_of, parse_with, parser_of, run_example, way_of
from transformers import LlamaConfig, LlamaForCausalLM

import rrfp_async

LAYERS = 8
NEWLINE = ord("\n")


class Elsewhere(nn.Module):
    """Stands where a module of another stage was, and hands on what that would have got."""

    def forward(self, hidden: torch.Tensor, **_: Any) -> torch.Tensor:
        """The hidden states as they came."""
        return hidden


class LlamaStage(nn.Module):
    """One stage of a LlamaForCausalLM: its own modules, under their own names.

    Layers of other stages are replaced, so that `LlamaModel.forward` itself, with its masks and
    rotary embedding, runs over what is left. It is called with `input_ids` or, from the second
    stage on, with `inputs_embeds`: the hidden states `(batch, seq, hidden)` of the stage before.

    Args:
        whole: The model; it is taken apart, and of no further use.
        index: Which of the stages.
        stages: How many there are, at most one for each layer.

    Raises:
        ValueError: If there are more stages than layers.
    """

    def __init__(self, whole: LlamaForCausalLM, index: int, stages: int) -> None:
        super().__init__()
        self.model, self.lm_head = whole.model, whole.lm_head
        self.takes = "inputs_embeds" if index else "input_ids"
        self.is_last = index == stages - 1
        layers = self.model.layers
        if stages > len(layers):
            raise ValueError(
                f"{len(layers)} layers cannot make {stages} stages: use fewer ranks or chunks"
            )
        own = range(len(layers) * index // stages, len(layers) * (index + 1) // stages)
        for place in set(range(len(layers))).difference(own):
            layers[place] = Elsewhere()
        if index > 0:
            self.model.embed_tokens = Elsewhere()
        if not self.is_last:
            self.model.norm = self.lm_head = Elsewhere()

    def forward(self, hidden: torch.Tensor, also: dict[str, torch.Tensor]) -> Any:
        """Logits from the last stage; from others hidden states, and `also` for the next.

        `also` holds the keyword arguments of the microbatch that every stage needs, such as
        `position_ids` or `attention_mask`, each `(batch, seq)`.
        """
        hidden = self.model(**{self.takes: hidden}, **also).last_hidden_state
        return self.lm_head(hidden) if self.is_last else (hidden, also)


class Llama(Recipe):
    """A Llama with random weights over bytes, several paragraphs of text packed in a sample.

    Args:
        tied: Whether the embedding's weight is also the head's.
    """

    context = 128

    def __init__(self, *, tied: bool = False) -> None:
        self._tied = tied

    def whole(self, seed: int) -> LlamaForCausalLM:
        """As transformers builds it, float32."""
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=self.context,
            tie_word_embeddings=self._tied,
            use_cache=False,  # a cache is for generation
        )
        return LlamaForCausalLM(config)

    def predict(self, whole: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """The model called as anyone calls it."""
        logits: torch.Tensor = whole(input_ids=tokens, position_ids=positions(tokens)).logits
        return logits

    def stage(self, seed: int, index: int, stages: int) -> LlamaStage:
        """Made from a whole model of the rank's own, of which the rest is dropped."""
        return LlamaStage(self.whole(seed), index, stages)

    def inputs(self, tokens: torch.Tensor) -> tuple[Any, ...]:
        """Tokens, and what travels with the hidden states."""
        return tokens, {"position_ids": positions(tokens)}

    def topology(self, options: argparse.Namespace) -> rrfp_async.Topology:
        """As the command line says; tied weights are named on the first and the last stage."""
        last = options.ranks * options.chunks - 1
        tie = {0: "model.embed_tokens.weight", last: "lm_head.weight"}
        return rrfp_async.Topology(
            options.ranks,
            **grid_of(options),
            tied=[tie] if self._tied and last else [],
        )


def positions(tokens: torch.Tensor) -> torch.Tensor:
    """Each byte's place in its paragraph, int64 `(batch, seq)`: 0 after an empty line.

    Where positions begin anew transformers sees another sequence, and attends to none before.
    """
    empty_line = (tokens[:, :-2] == NEWLINE) & (tokens[:, 1:-1] == NEWLINE)
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return places - (places * F.pad(empty_line, (2, 0))).cummax(1).values


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = parser_of(__doc__.splitlines()[0])
    parser.add_argument("--tied", action="store_true", help="the embedding is also the head")
    return parse_with(parser, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parse(arguments)
    return run_example(Llama(tied=options.tied), options, way_of(options))


if __name__ == "__main__":
    sys.exit(main())
