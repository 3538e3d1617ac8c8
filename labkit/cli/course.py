"""`labkit course`: assignments built, checked and graded. Registered in labkit/cli/commands.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labkit.cli.console import Json, aside, print_json, print_table
from labkit.errors import CourseError

if TYPE_CHECKING:
    from labkit.course.grade import Grade

app = typer.Typer(help="Build, check and grade assignments.")

Secret = Annotated[
    str | None,
    typer.Option("--variant", metavar="SECRET", help="Secret of a private variant. Default: the public variant."),
]
Assignment = Annotated[str | None, typer.Option(help="a1 to a5, for notebooks without metadata.")]


@app.command("list")
def course_list(as_json: Json = False) -> None:
    """List the assignments.

    Shows exercises, points and minutes.

    Example: labkit course list
    """
    from labkit.course.build import masters
    from labkit.course.exercises import assignment

    found = [assignment(name) for name in masters()]
    if as_json:
        fields = ("name", "title", "answer", "difficulty", "minutes", "points", "track")
        print_json(
            [
                {"name": of.name, "title": of.title, "minutes": of.minutes, "points": of.points}
                | {"exercises": [{field: getattr(each, field) for field in fields} for each in of.exercises.values()]}
                for of in found
            ]
        )
        return
    rows = [(of.name, of.title, str(len(of.exercises)), str(of.points), str(of.minutes)) for of in found]
    print_table(("", "assignment", "exercises", "points", "minutes"), rows)


@app.command("build")
def course_build(
    names: Annotated[list[str] | None, typer.Argument(metavar="[A1]...", help="Assignments. Default: all.")] = None,
    output_dir: Annotated[str, typer.Option(help="Folder for student/, solution/ and nbgrader/.")] = "course",
    variant: Secret = None,
    execute: Annotated[bool, typer.Option("--execute", help="Execute the solutions, to store their outputs.")] = False,
    as_json: Json = False,
) -> None:
    """Build the notebooks of the assignments.

    Writes the student notebooks, the solutions and the files for nbgrader. A secret changes the sentences, sizes,
    seeds, planted faults and hidden tests, and leaves the solutions out of the student notebooks. Keep the secret:
    grading needs it.

    Example: labkit course build --output-dir course --variant "spring, group 2"
    """
    from labkit.course.build import build
    from labkit.course.variant import Variant

    written = build(output_dir, Variant.of(variant), [name.lower() for name in names or ()] or None, execute=execute)
    if as_json:
        print_json([str(path) for path in written])
    else:
        print(f"{len(written)} files written to {output_dir}")


@app.command("check")
def course_check(
    notebook: Annotated[Path, typer.Argument(help="The notebook of your assignment.")],
    assignment: Assignment = None,
    as_json: Json = False,
) -> None:
    """Run an assignment and check your answers.

    Runs the notebook from top to bottom, with the same checks as its check cells. Exit code 1 unless every exercise has
    full points.

    Example: labkit course check a1_masks_and_attention.ipynb
    """
    from labkit.cli.console import waiting
    from labkit.course import grade, submissions
    from labkit.course.variant import Variant

    submission = submissions.read(notebook.stem, notebook, assignment and assignment.lower())
    with waiting(f"running {notebook.name}"):
        found = grade.grade(submission, Variant(submission.variant_key), hidden=False)
    if as_json:
        print_json(found.to_dict())
    else:
        rows = [(o.exercise, o.status, f"{o.points} of {o.out_of}") for o in found.outcomes]
        print_table(("exercise", "", "points"), [*rows, ("in all", "", f"{found.points} of {found.out_of}")])
        for outcome in found.outcomes:
            if outcome.message:
                print(f"\n{outcome}")
        for trouble in found.trouble:
            print(f"\n{trouble}")
    raise typer.Exit(0 if found.points == found.out_of else 1)


@app.command("grade")
def course_grade(
    path: Annotated[Path, typer.Argument(help="A notebook, or a folder with STUDENT.ipynb or STUDENT/NAME.ipynb.")],
    output_dir: Annotated[Path, typer.Option(help="Folder for the grades.")] = Path("grades"),
    variant: Secret = None,
    assignment: Assignment = None,
    jobs: Annotated[
        int | None, typer.Option(help="Number of submissions in parallel. Default: the number of cores.", min=1)
    ] = None,
    cell_seconds: Annotated[float, typer.Option(help="Time limit for a cell, in seconds.", min=1)] = 60,
    call_seconds: Annotated[
        float, typer.Option(help="Time limit for one call of an answer, in seconds.", min=0.1)
    ] = 10,
    total_seconds: Annotated[float, typer.Option(help="Time limit for a submission, in seconds.", min=1)] = 600,
    memory_gb: Annotated[float, typer.Option(help="Memory limit for a submission, in GiB.", min=0.5)] = 4,
    again: Annotated[bool, typer.Option("--again", help="Grade unchanged files again.")] = False,
    as_json: Json = False,
) -> None:
    """Grade submissions, with the hidden tests.

    Writes a page and a JSON file for each student, and grades.csv for the class. Each submission runs in its own
    process, with limits, and its answers are judged outside that process: a submission that fails, hangs or runs out of
    memory does not stop the others. After an interruption, the same command continues. Read docs/instructors.md on
    isolation before you run code that you do not trust. Exit code 1 if a submission could not be graded.

    Example: labkit course grade submissions --output-dir grades
    """
    from tqdm import tqdm

    from labkit.course import submissions
    from labkit.course.grade import grade_all
    from labkit.course.sandbox import Limits
    from labkit.course.variant import Variant

    limits = Limits(cell_seconds, call_seconds, total_seconds, int(memory_gb * 2**30))
    kept = 0
    with tqdm(total=len(submissions.find(path)), unit="submission", disable=None) as bar:

        def there(grade: Grade, was_there: bool) -> None:
            nonlocal kept
            kept += was_there
            bar.update()

        grades = grade_all(
            path, output_dir, variant=Variant.of(variant), limits=limits, jobs=jobs,
            assignment_name=assignment and assignment.lower(), again=again, on_grade=there,
        )  # fmt: skip
    failed = [grade for grade in grades if grade.failure]
    if as_json:
        print_json([grade.to_dict() for grade in grades])
    else:
        print_table(("student", "points", ""), [(g.student, f"{g.points} of {g.out_of}", g.failure) for g in grades])
        print(f"{output_dir}: {len(grades)} grades, {kept} of them kept from before; class.html, grades.csv")
    if grades and not failed and "no network" not in grades[0].in_force:
        print(
            "labkit: the submissions could reach the network: this system does not let it be taken away",
            file=sys.stderr,
        )
    raise typer.Exit(1 if failed else 0)


@app.command("gradebook")
def course_gradebook(
    grades: Annotated[Path, typer.Argument(help="The output folder of labkit course grade.")],
    kind: Annotated[str, typer.Option(help="canvas or moodle.")],
    output: Annotated[Path, typer.Option(help="The CSV file to write; - is standard output.")],
    roster: Annotated[
        Path | None, typer.Option(help="The CSV file that the gradebook exported: its rows are kept.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write grades for Canvas or Moodle.

    The CSV file can be imported into the gradebook.

    Example: labkit course gradebook grades --kind canvas --roster export.csv --output import.csv
    """
    from labkit.course.grade import read_grades
    from labkit.course.gradebook import gradebook_csv
    from labkit.files import write_whole

    found = list(read_grades(grades))
    if not found:
        raise CourseError(f"{grades} holds no grades; `labkit course grade` writes them")
    text, without = gradebook_csv(found, kind, roster)
    write_whole(output, text)
    with aside(output):
        if as_json:
            print_json({"file": str(output), "grades": len(found), "not_in_roster": without})
        else:
            print(f"{output}: {len(found) - len(without)} grades")
            if without:
                print(f"not in the roster: {', '.join(without)}")
