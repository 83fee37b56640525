"""Models with planted heads: ground truth for everything that claims to find out what heads do.

:func:`model` returns a real, unmodified ``LlamaForCausalLM`` or ``GPT2LMHeadModel`` whose weights
were written down, not trained, so that the heads you name do the jobs you name and no others do.
:func:`scramble` takes one circuit of one head away again, for controls.

How it works
------------

**The residual stream** is split into orthogonal subspaces, in random directions that depend on the
seed, so no single coordinate means anything:

=============  =====================================================================================
constant       norm 8, the same in every position
flag           1 on the first position (GPT-2) or on the BOS token (Llama)
token          the code of the token: one of ``vocab`` unit vectors in 46 dimensions, spread as far
               apart as can be; only the embedding writes here
previous       the code of the token before; written by previous_token heads
output         the code of the token to predict; written by induction heads, read by the unembedding
scratch        what duplicate_token heads write; nothing reads it
position       sines and cosines of the position at 8 frequencies (GPT-2 only)
=============  =====================================================================================

**Norm layers are harmless** because the constant makes up nearly all of the stream's norm: what
heads add changes the norm by a few per cent at most, so RMSNorm and LayerNorm (weights 1, biases 0)
multiply by nearly one number, which the weights divide out. Every direction is orthogonal to the
vector of ones, so LayerNorm's centring removes nothing.

**Each head** has eight position pairs, a flag, and 46 content dimensions.

* ``previous_token``: a score of distance alone, a sum of cosines that peaks one token back. The
  amplitudes solve a linear programme over every distance in the context, so there is no aliasing.
  Llama gets them from its fastest rotary pairs acting on constant vectors, GPT-2 from its position
  embedding. OV copies token → previous.
* ``duplicate_token``: token code against token code, plus a kernel of distance that puts the
  query's own position 4 nats below every earlier one. An earlier copy of the token wins; without
  one, the head rests on the token itself, which always matches. OV copies token → scratch.
* ``induction``: token code of the query against the previous code of the key (K-composition), so it
  needs a previous_token head in an earlier layer. Without a match its scores are nearly flat. OV
  copies token → output.
* ``sink``: a constant query against the flag; writes next to nothing.
* ``positional``: as previous_token, four tokens back. OV copies token → scratch.
* ``retrieval``: induction for a few marked words only (a cue and the colours), so that it copies an
  answer that follows the cue and is no induction head at large. OV copies token → output.
* ``contextual``: topic of the query's word against topic of the key's; words of four topics. OV
  copies token → scratch.
* ``temporal``: a constant query against the codes of four times; OV maps the code of a time to the
  code of the object of that time, in output.

The words that carry a meaning stand in ``meanings.py``, with the linear programmes that tell them
apart; ``Planted.records`` writes probe data with them.

Rotary embedding does not disturb the content dimensions: RoPE's θ is so large (about 1e16) that the
pairs holding them turn by no more than 0.05 rad over the whole context.

The other heads are random: ``distractors`` of them with scores that spread by 0.4 nats and an
output of norm 0.1, the rest with less of both. MLPs are random and negligible. With grouped
key/value heads a group's keys and values serve all of its query heads: any roles go together except
induction and retrieval, whose keys hold the token before, with duplicate_token, contextual and
temporal, whose keys hold the token itself.

Limits: the roles hold for sequences of up to ``max_context`` tokens. Llama's sink is the BOS token:
it needs one (the tokenizer adds it) and would follow a second one too; GPT-2's is position 0,
whatever stands there. A duplicate_token head cannot rest evenly: within one layer the query's own
key always matches, and RoPE tells distance 0 from 1 too little to cancel that exactly. Words
outside the vocabulary all become one token, ``<unk>``, which matches itself: probe with the
vocabulary's own words. An induction head predicts by copying only; without a repetition the logits
are nearly flat.
"""

from __future__ import annotations

from headlab.planted.build import Planted, model
from headlab.planted.plan import ROLES
from headlab.planted.scramble import scramble

__all__ = ["ROLES", "Planted", "model", "scramble"]
