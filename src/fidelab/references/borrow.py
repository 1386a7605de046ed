"""References that others ran: found in a folder or on the hub, and used instead of an experiment's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fidelab.config.schema import ArmConfig, EngineConfig, Experiment
from fidelab.core.errors import CaptureError, FidelabError, InputError, UnavailableError, UsageError
from fidelab.core.names import AUTO_TEXT
from fidelab.core.paths import expand
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import Model, hub
from fidelab.models.resolve import HUB_ID
from fidelab.references.pack import MANIFEST, Pack, check_listed, read_pack, sample_digest

HUB = "hf://"


def split_place(place: str) -> tuple[str, str | None]:
    """Split ``hf://owner/name[@revision]`` into repository and revision.

    Raises:
        UsageError: If it does not have this form.
    """
    match = HUB_ID.fullmatch(place.removeprefix(HUB))
    if not place.startswith(HUB) or match is None:
        raise UsageError(f"{place} is not a place on the hub: write hf://owner/name or hf://owner/name@revision")
    return match["repo"], match["revision"]


def find_pack(place: str, *, whole: bool = True) -> Pack:
    """Find the pack in a folder or on the hub. Without ``whole``, only the manifest is fetched from the hub.

    If the hub cannot be reached, a pack that was fetched before is used.

    Raises:
        InputError, UnavailableError: If there is no pack, or the hub cannot be reached.
        CaptureError: If it is damaged.
    """
    if not place.startswith(HUB):
        return read_pack(expand(place), place)
    repo, revision = split_place(place)
    try:
        sizes = hub.dataset_sizes(repo, revision)
    except UnavailableError:
        try:
            folder = hub.dataset_files(repo, revision, [MANIFEST], local=True)
        except FidelabError:
            folder = Path()
        if not (folder / MANIFEST).is_file():
            raise
        return read_pack(folder, f"{HUB}{repo}@{folder.name}")
    check_listed(place, sizes)
    folder = hub.dataset_files(repo, revision, [MANIFEST])  # by its name, under which it is then found offline
    place = f"{HUB}{repo}@{folder.name}"
    pack = read_pack(folder, place)
    if whole:
        for file in pack.manifest.files:
            if sizes.get(file.name) != file.bytes:
                raise CaptureError(f"{place}: {file.name} is missing or truncated there; publish the pack again")
        hub.dataset_files(repo, folder.name, [file.name for file in pack.manifest.files])
    return pack


def find_for(model: Model, places: Sequence[str], note: Callable[[str], None]) -> str | None:
    """Return the first place that has a pack of this checkpoint; ``None`` if none has.

    A place is a pack, on the hub or in a folder, or a folder of packs. Places that cannot be read or reached are noted.
    """
    for place in places:
        folder = Path() if place.startswith(HUB) else expand(place)
        packs = [place]
        if not (place.startswith(HUB) or (folder / MANIFEST).is_file() or not folder.is_dir()):
            packs = [str(path.parent) for path in sorted(folder.glob(f"*/{MANIFEST}"))]
        for one in packs:
            try:
                if find_pack(one, whole=False).manifest.checkpoint_sha256 == model.weights:
                    return one
            except FidelabError as error:
                note(str(error))
    return None


def borrow(experiment: Experiment) -> tuple[Experiment, Pack | None]:
    """Return the experiment with the settings of a checked pack, and the pack; unchanged without ``reference_from``.

    Raises:
        UsageError: If it needs the reference's engine, or an axis that the pack lacks.
        FidelabError: As :func:`find_pack` and :meth:`Pack.check`.
    """
    if experiment.reference_from is None:
        return experiment, None
    wants = {
        "benches": experiment.benches,
        "speed": experiment.speed,
        "control": experiment.control not in ("auto", "none"),
        "runs": experiment.runs > 1,
        "text": experiment.text not in (AUTO_TEXT, "default"),
        "prompts": experiment.prompts != "default",
        "traffic": experiment.traffic,
    }
    if asked := next((name for name, value in wants.items() if value), None):
        raise UsageError(f"{asked}: a borrowed reference answers no new questions; leave it out, or run the reference")
    pack = find_pack(experiment.reference_from)
    pack.check()
    there = pack.manifest.axes
    if lacking := [name for name in experiment.axes if name not in there]:
        raise UsageError(f"{pack.place} has no saved outputs of test {lacking[0]}; it has {', '.join(there)}")
    arm = pack.arm
    engine = None if arm.engine == experiment.engine.name else EngineConfig(name=arm.engine)
    changed = {
        "reference": ArmConfig(kv=arm.kv, name=arm.name, engine=engine),
        "reference_from": pack.place if pack.place.startswith(HUB) else str(pack.folder),
        "axes": {name: there[name] for name in experiment.axes},
        "control": "none",
        "floor": 0.0,
        "speed": False,
    }
    return experiment.model_copy(update=changed), pack


def check_model(pack: Pack, model: Model, tokenizer: Tokenizer) -> None:
    """Refuse a model that cannot answer a pack's windows.

    Raises:
        MismatchError: If the tokenizer or the vocabulary differs.
        InputError: If its context is shorter than a window.
    """
    pack.check_tokenizer(tokenizer.vocabulary(), tokenizer.pieces(), sample_digest(tokenizer.encode))
    longest = max(len(item) for capture in pack.captures.values() for item in capture.request.items())
    if model.max_positions is not None and longest > model.max_positions:
        what = f"reads {model.max_positions:,} tokens, and {pack.place} has windows of {longest:,}"
        raise InputError(f"{model.name} {what}; name another pack")
