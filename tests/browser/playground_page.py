"""Parts that the playground's tests share: filling in its form, its cards, their images, and the code they copy."""

import base64
import io
import os
import subprocess
import sys

import numpy as np
from PIL import Image

# For two cores that run other tests, too.
TIMEOUT_MS = 240_000


def generate(page, **settings):
    """Fill `settings` into the form and press Generate."""
    for name, value in settings.items():
        field = page.locator(f"#{name}")
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(str(value))
    page.click("#generate")


def card(page, state, number=0):
    """The card `number` of those in a state."""
    return page.locator(f'.generation[data-state="{state}"]').nth(number)


def pixels(data):
    """[height, width, 3] of an image file."""
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


def file_of(page, image="img.final"):
    """The bytes of an image on the page."""
    text = page.locator(image).first.evaluate(
        """async (image) => {
          const canvas = document.createElement("canvas");
          [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
          canvas.getContext("2d").drawImage(image, 0, 0);
          return canvas.toDataURL("image/png");
        }"""
    )
    return base64.b64decode(text.partition(",")[2])


def copied(page, name):
    """The code that the button `name` copies."""
    page.locator(f"button:text-is('{name}')").first.click()
    page.locator("#announcements", has_text=f"Copied as {name}.").wait_for()
    return page.evaluate("navigator.clipboard.readText()")


def run_snippet(name, code, folder, environment):
    """Run the code in `folder`; returns the file that it writes."""
    folder.mkdir(exist_ok=True)
    before = set(folder.iterdir())
    command = ["sh", "-c", code] if name == "curl" else [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr + code
    (file,) = set(folder.iterdir()) - before
    return file


def check_copied_code(page, folder):
    """Check that the code of each kind makes the first image on the page from the files in `folder`."""
    shown = pixels(file_of(page))
    for name in ("curl", "openai", "Python"):
        result = run_snippet(name, copied(page, name), folder, os.environ)
        assert np.abs(pixels(result.read_bytes()) - shown).max() <= 1, name
        result.unlink()


def transfer(page, name, content, media_type="image/png"):
    """A DataTransfer of one file, for events."""
    return page.evaluate_handle(
        """([name, text, type]) => {
          const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
          const transfer = new DataTransfer();
          transfer.items.add(new File([bytes], name, {type}));
          return transfer;
        }""",
        [name, base64.b64encode(content).decode(), media_type],
    )
