"""What can be used without `watch` is in one package, and in `forewarn` itself."""

import ast
import subprocess
import sys
from pathlib import Path

import forewarn
from forewarn import standalone


def test_every_name_is_the_same_object_in_forewarn():
    assert set(standalone.__all__) <= set(forewarn.__all__)
    assert all(getattr(standalone, name) is getattr(forewarn, name) for name in standalone.__all__)


def test_no_name_that_lives_there_is_missing_from_the_package():
    folder = Path(standalone.__file__).parent
    defined = {
        node.name
        for path in folder.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    assert defined & set(forewarn.__all__) <= set(standalone.__all__)


def test_functions_of_plain_numbers_need_no_torch():
    code = "import sys, forewarn; forewarn.detect_vanishing_gradients({'a': 0.0}); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
