"""Turn the draft folder into the reply to the newest request; author.md says how."""

import argparse
import json
import os
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def files(folder):
    """Relative name -> text of a folder's files, caches and hidden files left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in name.parts)
        if path.is_file() and not hidden and path.suffix != ".pyc":
            found[name.as_posix()] = path.read_text()
    return found


def tool(name, /, **given):
    """One tool call."""
    return {"type": "tool_use", "name": name, "input": given}


def changes(draft, engine):
    """Calls that make the engine equal to the draft."""
    for name, text in draft.items():
        if engine.get(name) != text:
            yield tool("str_replace_based_edit_tool", command="create", path=name, file_text=text)
    for name in sorted(engine.keys() - draft.keys()):
        yield tool("remove_file", path=name)


def newest():
    """Number of the newest request; 0 when there is none."""
    numbers = [int(path.stem.split("-")[1]) for path in HERE.glob("request-*.json")]
    return max(numbers, default=0)


def wait(after):
    """Return when a request newer than `after` is there, or the run has ended."""
    while newest() <= after and not (HERE / "state.txt").is_file():
        error = HERE / f"reply-{after:04d}.error.txt"
        if error.is_file():
            raise SystemExit(error.read_text())
        time.sleep(1)
    ended = HERE / "state.txt"
    print(ended.read_text() if ended.is_file() else f"request-{newest():04d}.md")


def blocks(options):
    """The content blocks of the reply, in the order in which they are carried out."""
    content = [{"type": "text", "text": options.text}] if options.text else []
    if not options.no_files and (HERE / "draft").is_dir():
        content += changes(files(HERE / "draft"), files(HERE / "engine"))
    content += [tool("read_skill", name=name) for name in options.skill]
    content += [tool("bash", command=command) for command in options.bash]
    content += [tool("run_gate", gates=options.gate)] if options.gate else []
    if options.inspect is not None:
        content.append(tool("inspect_kernel", kernels=options.inspect, target=options.target))
    content += [tool("measure")] if options.measure else []
    if options.review:
        findings = json.loads(Path(options.review).read_text())
        content.append(tool("submit_review", findings=findings))
    if options.propose:
        given = {"hypothesis": options.propose, "predicted_ratio": options.ratio}
        content.append(tool("propose", assumes=options.assumes, **given))
    return content + ([tool("submit_phase")] if options.submit else [])


def main():
    """Write reply-NNNN.json whole, or wait for the next request."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("gate", "bash", "skill", "assumes"):
        parser.add_argument(f"--{name}", action="append", default=[])
    for name in ("measure", "submit", "no-files", "wait"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("text", "review", "propose"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--ratio", type=float, default=1.0)
    parser.add_argument("--inspect", nargs="*")
    parser.add_argument("--target", default="sm_90a")
    options = parser.parse_args()
    number = newest()
    reply = HERE / f"reply-{number:04d}.json"
    if options.wait:
        answered = reply.is_file() or reply.with_suffix(".error.txt").is_file()
        return wait(number if answered else number - 1)
    content = blocks(options)
    if not content:
        raise SystemExit("nothing to say: no file differs, and no call was asked for")
    reply.with_suffix(".error.txt").unlink(missing_ok=True)
    scratch = reply.with_suffix(".writing")
    scratch.write_text(json.dumps(content, indent=1))
    os.replace(scratch, reply)
    print(f"{reply.name}: {', '.join(block.get('name', block['type']) for block in content)}")


if __name__ == "__main__":
    main()
