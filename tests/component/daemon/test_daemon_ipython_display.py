"""What a cell shows beside text, through a real daemon."""

from __future__ import annotations

import struct
import zlib

import pytest
import trio

from prorl_daemon.displays import MAX_DISPLAY_BYTES, MAX_DISPLAYS, Displays
from prorl_ipc.sandbox_calls import CellResult, Display, IpythonRun
from prorl_trio.tools.builtin import render_cell

CALL_TIMEOUT_S = 60


def png_chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


PNG = (
    b"\x89PNG\r\n\x1a\n"
    + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    + png_chunk(b"IDAT", zlib.compress(b"\0\0"))
    + png_chunk(b"IEND", b"")
)
IMAGE = Display(mime="image/png", data=PNG, size_bytes=len(PNG))
DEFINE = f"""
class Dot:
    def __repr__(self): return 'dot'
    def _repr_png_(self): return {PNG!r}
"""


async def cell(sandbox, code, **options):
    with trio.fail_after(CALL_TIMEOUT_S + 10):
        request = IpythonRun(code=code, timeout_s=30.0, **options)
        return await sandbox.call(request, CellResult, timeout_s=CALL_TIMEOUT_S)


async def test_images_come_as_their_own_bytes(sandbox):
    result = await cell(sandbox, DEFINE + "Dot()")
    assert (result.result, result.displays, result.stdout) == ("dot", [IMAGE], "")
    assert render_cell(result, 30) == f"dot\n[image/png, {len(PNG)} bytes]"
    result = await cell(sandbox, "display(Dot(), Dot()); print('after')")
    assert (result.result, result.displays, result.stdout) == (None, [IMAGE, IMAGE], "dot\ndot\nafter\n")
    result = await cell(sandbox, f"from IPython.display import Image\nImage(data={PNG!r})")
    assert result.displays == [IMAGE]
    result = await cell(sandbox, "Dot();")
    assert (result.result, result.displays) == (None, [])
    assert (await cell(sandbox, "1")).displays == []


async def test_a_display_before_an_error_is_kept(sandbox):
    result = await cell(sandbox, DEFINE + "display(Dot())\n1/0")
    assert (result.error.name, result.displays) == ("ZeroDivisionError", [IMAGE])
    assert "[image/png," in render_cell(result, 30)


async def test_html_and_svg_are_named_only(sandbox):
    result = await cell(sandbox, "from IPython.display import HTML, SVG\ndisplay(SVG('<svg></svg>'))\nHTML('<b>é</b>')")
    assert [(display.mime, display.data) for display in result.displays] == [("image/svg+xml", b""), ("text/html", b"")]
    assert result.displays[1].size_bytes == len("<b>é</b>".encode())
    assert "<b>" not in render_cell(result, 30)


async def test_images_beyond_the_limits_are_named_and_counted(sandbox):
    big = f"\nclass Big(Dot):\n    def _repr_png_(self): return bytes({MAX_DISPLAY_BYTES - 10})\n"
    result = await cell(sandbox, DEFINE + big + "display(Big(), Dot()); Big()")
    assert [(len(d.data), d.size_bytes) for d in result.displays] == [
        (MAX_DISPLAY_BYTES - 10, MAX_DISPLAY_BYTES - 10),
        (0, len(PNG)),
        (0, MAX_DISPLAY_BYTES - 10),
    ]
    result = await cell(sandbox, f"for _ in range({MAX_DISPLAYS + 5}): display(Dot())")
    assert (len(result.displays), result.dropped_displays) == (MAX_DISPLAYS, 5)
    assert "[5 more were not kept]" in render_cell(result, 30)


async def test_the_largest_result_fits_a_frame(sandbox):
    many = 1024 * 1024
    code = f"import os\nos.write(1, b'\\xff' * {many}); os.write(2, b'\\xff' * {many})\n"
    code += f"class Big:\n    def __repr__(self): return 'é' * {many // 2}\n"
    code += f"    def _repr_png_(self): return bytes({MAX_DISPLAY_BYTES})\n"
    result = await cell(sandbox, code + "Big()", max_output_bytes=many)
    assert (len(result.stdout), len(result.stderr)) == (many, many)
    assert len(result.displays[0].data) == MAX_DISPLAY_BYTES


async def test_a_failing_repr_is_shown_and_the_cell_is_no_failure(sandbox):
    result = await cell(sandbox, "class Bad:\n    def __repr__(self): raise ValueError('of mine')\nBad()")
    assert result.error is None
    assert "ValueError: of mine" in result.stderr
    assert "prorl_daemon" not in result.stderr
    assert "\x1b" not in result.stderr


async def test_output_is_not_kept_in_the_kernel(sandbox):
    await cell(sandbox, "print('x' * 100); 1")
    result = await cell(sandbox, "dict(get_ipython().history_manager.outputs)")
    assert result.result == "{}"


async def test_figures_are_shown_at_the_end_of_the_cell(sandbox):
    pytest.importorskip("matplotlib")
    code = "import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show()\nplt.figure(); plt.plot([2, 1]);"
    result = await cell(sandbox, code)
    assert result.error is None, result
    assert (result.stdout, result.stderr) == ("", "")
    assert [display.mime for display in result.displays] == ["image/png"] * 2
    assert all(display.data.startswith(b"\x89PNG") for display in result.displays)
    assert (await cell(sandbox, "plt.get_fignums()")).result == "[]"
    result = await cell(sandbox, "%matplotlib inline\nplt.plot([1, 2]); plt.show()")
    assert (result.error, len(result.displays), result.stderr) == (None, 1, "")
    result = await cell(sandbox, "plt.plot([1]); plt.title('$\\\\nonsense$');")
    assert "nonsense" in result.stderr
    assert result.displays == []
    assert (await cell(sandbox, "1")).result == "1"


async def test_pil_images_are_shown(sandbox):
    pytest.importorskip("PIL")
    result = await cell(sandbox, "from PIL import Image\nImage.new('RGB', (2, 2))")
    assert [display.mime for display in result.displays] == ["image/png"]


def test_what_is_no_base64_is_named():
    displays = Displays()
    displays.add({"image/png": "no base 64 at all", "text/plain": "x"})
    displays.add({"text/plain": "x"})
    assert displays.kept == [Display(mime="image/png", data=b"", size_bytes=0)]
