"""Answers to the same prompts at temperature 0, before and after a replay (`probes.before.json`, `probes.after.json`).

A store that hands back the wrong blocks gives fluent nonsense, not errors: only a comparison of answers shows it.
"""

from pathlib import Path

from workflow.contract import InputError, read_json


def read_probes(path: Path) -> dict[str, str]:
    """Return {prompt: answer} from a JSON list of {"prompt": ..., "answer": ...}.

    Raises InputError: no such file, not JSON, or another shape.
    """
    data = read_json(path)
    answers: dict[str, str] = {}
    for entry in data if isinstance(data, list) else [data]:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("prompt", "answer")):
            raise InputError(
                f"found {str(entry)[:60]} among the probes",
                file=path,
                allowed='a list of {"prompt": text, "answer": text}',
                do="write the probes again with the run that is measured",
            )
        answers[entry["prompt"]] = entry["answer"]
    return answers


def changed_answers(before: Path, after: Path) -> tuple[str, ...]:
    """Return the prompts whose answer differs, or is missing, after the replay."""
    first, last = read_probes(before), read_probes(after)
    return tuple(prompt for prompt, answer in first.items() if last.get(prompt) != answer)
