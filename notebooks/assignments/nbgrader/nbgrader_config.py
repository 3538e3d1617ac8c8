"""nbgrader's settings for this course: run nbgrader in this folder. See docs/instructors.md."""

c = get_config()  # noqa: F821  (nbgrader defines it)
c.CourseDirectory.course_id = "labkit"
c.ClearSolutions.code_stub = {"python": 'raise NotImplementedError("not begun")'}
c.ExecutePreprocessor.timeout = 120
