"""Random states that the function reads and sets again, as torch.utils.checkpoint does.

Such a state is a *token*: on the host the state itself, which the tape reads anew; in a capture a stand-in for the
two words from which the numbers are drawn and how far the recording has come since. One that lives on until the
backward is saved for it like a tensor: its Graph knows at which place.
"""

import struct
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import cgt_core as core
import torch

from ..data import Seen
from ..words import errors
from .devices import name_of
from .observe import exchange, fix, is_host_recording, note_memory, refuse, unseen, user_line


class Token(NamedTuple):
    """A random state that was read."""

    state: Any  # weak reference to the tensor
    moved: int  # how far the recording had come
    generator: Any
    words: Any  # what it counts from; None: the state itself. When the run is over: are there any?


def how_far(seen: Seen) -> list[int]:
    """How far the recording moved each generator so far."""
    return [core.moved_generator(rng.handle) for rng in seen.generators.words.values()]


def see_draw(seen: Seen, generator: torch.Generator, after: bool) -> None:
    """Between two draws nobody may set a generator's state: a replay would not set it again. (A CUDA
    capture refuses by itself.) Called before and after each draw, and around the run."""
    now, key = generator.get_state(), core.generator_id(generator)
    was = None if after else seen.generators.states.get(key)
    if was is not None and not torch.equal(was, now) and not is_others(seen):
        refuse(seen, errors.reseeded(user_line(seen)))
    seen.generators.states[key] = now


def is_others(seen):
    """Did another thread draw, and not a run that is over, which neither drew nor called what seeds?"""
    seeds = any(code is not None and code.co_filename == torch.random.__file__ for code in list(seen.code.started))
    return bool(seen.elsewhere) and not seen.draws and not seeds


def see_get_state(seen: Seen, generator: torch.Generator, plain: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The function reads a default generator's state."""
    begin(seen, "get_rng_state", generator)
    if generator.device.type == "cpu" or not seen.run.recording:
        with unseen(seen):
            state = plain()
            note_token(seen, state, 0, generator, None)
            if is_host_recording(seen):
                note_memory(seen, state, user_line(seen))
                seen.alive.memory.append(seen.alive.objects.pop())
                core.state_op(generator, state, False)
        return state
    gid = core.generator_id(generator)
    rng = seen.generators.words[gid]
    words, moved = rng.at, core.moved_generator(rng.handle)
    if rng.copy is None and words is rng.words:  # its backward may ask for the words of this very run
        rng = seen.generators.words[gid] = rng._replace(copy=words.clone())
    state = torch.frombuffer(bytearray(16), dtype=torch.uint8)
    kept = rng.copy if words is rng.words else words
    note_token(seen, state, moved, generator, kept)
    return state


def begin(seen, name, generator):
    """A recording's words are for the generators of its own GPUs, which a first run shows."""
    if seen.cuts.bodies:
        refuse(seen, errors.body_acts(name, user_line(seen)))
    seen.acts = True
    is_home = generator.device.index in (seen.run.device, *seen.run.others)
    if generator.device.type == "cuda" and seen.run.recording and not is_home:
        refuse(seen, errors.other_device(name, user_line(seen), generator.device, name_of(seen.run.device)))


def note_token(seen, state, moved, generator, words):
    """Weakly: whoever still holds it at the end will ask for it later. Its address is not used again."""
    seen.generators.tokens[core.storage_id(state)] = Token(weakref.ref(state), moved, generator, words)
    with unseen(seen):
        seen.alive.objects.append(core.alias(state))


def see_set_state(seen: Seen, generator: torch.Generator, state: torch.Tensor, plain: Callable) -> object:
    """The function sets a default generator's state: to a token, or it cannot be replayed."""
    begin(seen, "set_rng_state", generator)
    sid = core.storage_id(state)
    state, moved, words = token_of(seen, sid, state)
    if words is None:  # set to what the function did not read: the next draw, or the end, refuses
        with unseen(seen):
            return plain(state)
    if generator.device.type != "cpu" and seen.run.recording:
        gid = core.generator_id(generator)
        rng = seen.generators.words[gid]
        seen.generators.words[gid] = rng._replace(at=rng.words if words is rng.copy else words)
        core.point_generator(rng.handle, words[0:1], words[1:2], moved)
        return None
    with unseen(seen):
        plain(real_state(state, moved, words))
        if generator.device.type == "cpu":
            seen.generators.states[core.generator_id(generator)] = generator.get_state()
        if is_host_recording(seen):
            if sid not in seen.made:
                seen.touched.setdefault(core.storage_id(state), state)
            core.state_op(generator, fix(seen, exchange(seen, state)), True)
    return None


def token_of(seen, sid, state):
    """(state, how far a recording had come, the words it counts from), of this run or of the forward
    whose backward it is; words are None for a state that is no token."""
    token = seen.generators.tokens.get(sid)
    if token is not None:
        return state, token.moved, state if token.words is None else token.words
    found = seen.run.graph.tokens.get(sid) if seen.run.graph is not None else None
    if found is None:
        return state, 0, None
    at, moved, _ = found
    words = seen.run.graph.leaves.tensors[at]
    return words, moved, words


def real_state(state, moved, words):
    """A token as a generator takes it."""
    if words.dtype == torch.uint8:
        return state
    seed, offset = words.tolist()
    return pack_state(seed, offset + moved)


def drop_words(seen: Seen) -> None:
    """Whoever needs a copy of the recording's words has it now; else its memory can go."""
    words, tokens = seen.generators.words, seen.generators.tokens
    words.update({gid: rng._replace(copy=None) for gid, rng in words.items()})
    tokens.update({sid: token._replace(words=token.words is not None) for sid, token in tokens.items()})


def fill_tokens(seen: Seen, words: list[tuple[int, int]]) -> None:
    """The capture was launched once and is thrown away: its tokens are now the states they stand for."""
    began = dict(zip(seen.generators.words, words, strict=True))
    for token in seen.generators.tokens.values():
        state = token.state()
        if state is not None and token.words:
            seed, offset = began[core.generator_id(token.generator)]
            state.copy_(pack_state(seed, offset + token.moved))


def pack_state(seed, offset):
    """The state of a CUDA generator as get_state() gives it."""
    return torch.frombuffer(bytearray(struct.pack("=Qq", seed % 2**64, offset)), dtype=torch.uint8)
