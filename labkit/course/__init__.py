"""The course: assignments whose checks explain the mistake they found, their build, and their grading.

    from labkit.course import check            # in an assignment
    check.a1_causal_mask(causal_mask)          # says what was expected, what came, and the likely cause

An assignment is a master (`notebooks/assignments/src/a1_*.py`) and a module of checks
(`notebooks/assignments/checks/a1.py`, imported as `labkit.course.a1`).
`labkit course build` makes the student's notebook, the solution and the nbgrader files from them; `labkit course grade`
runs submissions in processes of their own and judges from outside what they answer.
"""

from labkit import files

CHECKS = files.folder("notebooks") / "assignments" / "checks"
__path__.append(str(CHECKS))
