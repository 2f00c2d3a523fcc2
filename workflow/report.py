"""What the report shows: the figures by name, in order, with the question each one answers."""

from collections.abc import Mapping

FIGURES: Mapping[str, str] = {
    "sweep": "What was measured, and what was not",
    "ttft": "How long until the first token?",
    "prompt_tokens": "Where did the prompt tokens come from?",
    "throughput_interactivity": "What does interactivity cost in throughput?",
    "ratios": "Which backend wins, and how sure is it?",
}
"""Name of each figure -> its question. The caption of figure X is workflow/captions/X.rst."""
