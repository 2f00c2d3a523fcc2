"""The figures of a sweep. Apart from what draws them: rules need the names only, and drawing imports for seconds."""

from collections.abc import Mapping

FIGURES: Mapping[str, str] = {
    "sweep": "What was measured, and what was not",
    "ratios": "Which backend wins, by how much, and how sure is it?",
    "throughput_interactivity": "What does interactivity cost in throughput?",
    "latency": "How long until the first token, and between tokens?",
    "prompt_tokens": "Where did the prompt tokens come from?",
    "transfers": "What did it cost to bring them?",
    "history": "What changed from entry to entry of the changelog?",
}
"""Name of each figure -> its question, in the order of the report. The caption of figure X is in captions/X.rst."""
