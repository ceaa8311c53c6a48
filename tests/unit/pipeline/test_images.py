"""Start images as people have them."""

import pytest
from PIL import Image

from wanfit.errors import InputError
from wanfit.pipeline.images import fit_image, load_image, size_for_image


def test_grey_is_spread_and_said(tmp_path):
    Image.new("L", (40, 30), 77).save(tmp_path / "grey.png")
    picture, notices = load_image(tmp_path / "grey.png", "image")
    assert picture.mode == "RGB" and picture.getpixel((3, 3)) == (77, 77, 77)
    assert "grey" in notices[0]


def test_exif_rotation_is_honoured_and_said(tmp_path):
    upright = Image.new("RGB", (40, 30), "red")
    upright.paste((0, 0, 255), (0, 0, 20, 30))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn a quarter clockwise to view
    upright.save(tmp_path / "turned.jpg", exif=exif, quality=95)
    picture, notices = load_image(tmp_path / "turned.jpg", "image")
    assert picture.size == (30, 40)
    assert picture.getpixel((15, 5))[2] > 200, "the blue left half is on top after the turn"
    assert "EXIF" in notices[0] and "30x40" in notices[0]


def test_opaque_alpha_is_dropped_and_said(tmp_path):
    Image.new("RGBA", (20, 20), (1, 2, 3, 255)).save(tmp_path / "opaque.png")
    picture, notices = load_image(tmp_path / "opaque.png", "image")
    assert picture.mode == "RGB" and picture.getpixel((0, 0)) == (1, 2, 3) and "alpha" in notices[0]


@pytest.mark.parametrize("mode", ["RGBA", "P"])
def test_transparency_is_refused_with_its_share(tmp_path, mode):
    picture = Image.new("RGBA", (20, 20), (200, 10, 10, 255))
    picture.paste((0, 0, 0, 0), (0, 0, 20, 5))
    if mode == "P":
        picture = picture.quantize(8)
    picture.save(tmp_path / "hole.png")
    with pytest.raises(InputError, match=r"25\.0 %"):
        load_image(tmp_path / "hole.png", "image")


def damaged(path):
    Image.effect_noise((64, 64), 90).convert("RGB").save(path)
    path.write_bytes(path.read_bytes()[:2000])


@pytest.mark.parametrize(
    ("name", "make", "said"),
    [
        ("missing.png", lambda path: None, "does not exist"),
        ("text.png", lambda path: path.write_text("not a picture"), "cannot be read"),
        ("empty.png", lambda path: path.write_bytes(b""), "cannot be read"),
        ("cut.png", damaged, "cannot be read"),
        ("deep.tif", lambda path: Image.new("F", (9, 9)).save(path), "pixel format F"),
    ],
)
def test_what_is_no_usable_picture_is_refused(tmp_path, name, make, said):
    make(tmp_path / name)
    with pytest.raises(InputError, match=said) as caught:
        load_image(tmp_path / name, "last_image")
    assert "--last-image" in caught.value.render({"last_image": "--last-image"})


def test_fitting_cuts_evenly_and_never_stretches():
    wide = Image.new("RGB", (200, 100), "black")
    wide.paste((255, 255, 255), (90, 40, 110, 60))
    fitted, said = fit_image(wide, 100, 100)
    assert fitted.size == (100, 100) and "50 %" in said
    box = fitted.convert("L").point(lambda value: 255 * (value > 128)).getbbox()
    assert abs((box[2] - box[0]) - (box[3] - box[1])) <= 1, "the white square is still a square"
    assert fit_image(Image.new("RGB", (208, 120)), 832, 480)[1] == ""


def test_size_follows_the_picture_within_the_official_area():
    assert size_for_image(Image.new("RGB", (832, 480)), 832 * 480, 16) == (832, 480)
    width, height = size_for_image(Image.new("RGB", (600, 900)), 832 * 480, 16)
    assert width * height <= 832 * 480 and width % 16 == height % 16 == 0
    assert height / width == pytest.approx(1.5, rel=0.04)
