"""The reviewer: a fresh context that reads the code and the skills, never the author's words.

It comes after the gates have passed a phase. What it finds goes back to the implementer as a list;
after the second rejection with the skills on such failures, after the third to a person.
"""

from __future__ import annotations

from collections.abc import Sequence

from metainfer_lab.agent.phases import Phase
from metainfer_lab.agent.transcript import Finding
from metainfer_lab.skills import Skill

REJECTIONS_BEFORE_HINTS = 2
SYSTEM = """\
You review one phase of an inference engine that somebody else wrote. You see its files, the spec
and the skills, and nothing of what its author said. Gates have run it on drawn inputs and found it
right; you look for what they cannot see.

- A finding is a place where the code departs from a skill or from the spec: a formula that holds
  by accident of the sizes, a missing refusal, a special case made for a check, a way out that hides
  an error, an answer that is stored, state that outlives its request, a second way to do one thing,
  a rule of style broken. Taste is no finding.
- Each names file, line, the skill that it departs from, what was expected, what stands there.
- Read every file of this phase before you judge: `view` of str_replace_based_edit_tool shows them.
- End with submit_review. An empty list approves; be neither polite nor inventive.
"""
NO_CALL = "No review was handed in. Go on reading, and end with submit_review."


def task(phase: Phase) -> str:
    """What a reviewer is asked."""
    passed = f"The gates {', '.join(phase.all_gates)} have passed."
    return f"# Review of phase `{phase.name}`: {phase.goal}\n\n{passed}"


def returned(findings: Sequence[Finding], hints: Sequence[Skill]) -> str:
    """What the implementer reads after a rejection."""
    items = "\n".join(f"- {finding}" for finding in findings)
    text = (
        "The gates passed, and a reviewer who read the code sent it back. Correct what is wrong "
        f"(or make the code say why it is right), then submit_phase again.\n\n{items}"
    )
    shown = "\n\n".join(str(skill) for skill in hints)
    return f"{text}\n\nSkills on such failures:\n\n{shown}" if hints else text


def matching(findings: Sequence[Finding], skills: Sequence[Skill]) -> list[Skill]:
    """The failure skills that findings name, or that build upon a skill which they name."""
    named = {finding.skill for finding in findings}
    return [
        skill
        for skill in skills
        if skill.layer == "failures" and named & {skill.name, *skill.requires}
    ]


def report(phase: str, rejections: Sequence[Sequence[Finding]]) -> str:
    """For a person: what was held against the phase, review by review."""
    lines = [f"phase {phase}: the reviewer sent it back {len(rejections)} times"]
    for number, findings in enumerate(rejections, 1):
        lines += [f"review {number}:", *(f"- {finding}" for finding in findings)]
    return "\n".join(lines)
