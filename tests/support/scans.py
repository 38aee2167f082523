"""Small heads and small data sets, made for tests."""

import gzip
import json

import nibabel
import numpy as np

CODES = {"csf": 1, "gm": 2, "wm": 3}
DSEG_TSV = "index\tname\tabbreviation\n1\tCerebrospinal fluid\tCSF\n2\tGrey matter\tGM\n3\tWhite matter\tWM\n"


def head(seed=0, shape=(40, 48, 44), spacing=4.0, skull=True):
    """(T1, labels, affine) of a lopsided ball of white matter, cortex and CSF within a skull, in RAS order."""
    rng = np.random.default_rng(seed)
    affine = np.diag([spacing] * 3 + [1.0])
    affine[:3, 3] = -spacing * (np.array(shape) - 1) / 2 + rng.uniform(-3, 3, 3)
    x, y, z = np.meshgrid(*(spacing * (np.arange(n) - (n - 1) / 2) for n in shape), indexing="ij")
    radius = np.sqrt((x / 55) ** 2 + (y / 70) ** 2 + ((z - 6) / 52) ** 2) + 0.04 * np.sin(x / 9 + seed) * np.cos(y / 11)
    labels = np.zeros(shape, np.uint8)
    labels[radius < 1.1] = CODES["csf"]
    labels[radius < 1.0] = CODES["gm"]
    labels[radius < 0.8] = CODES["wm"]
    labels[(np.abs(x - 8) < 9) & (np.abs(y) < 20) & (np.abs(z) < 9)] = CODES["csf"]
    t1 = np.choose(labels, [0, 250, 600, 900]).astype(np.float32) + 40 * np.sin(x / 20 + y / 30)
    if skull:
        t1[(radius > 1.2) & (radius < 1.35)] = 1100
        t1 += rng.normal(0, 12, shape)
    else:
        t1[labels == 0] = 0
    return np.rint(np.clip(t1, 0, 3000)).astype(np.int16), labels, affine


def save(path, data, affine, *, qform=True):
    image = nibabel.Nifti1Image(data, affine)
    image.set_sform(affine, 1)
    image.set_qform(affine, 1 if qform else 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(image, path)
    return path


def bids_set(root, people=6, sessions=(None,), table=None, labels=True, batch=lambda i: "AB"[i % 2]):
    """A BIDS set of heads with dseg derivatives; ``table`` replaces participants.tsv."""
    (root / "derivatives" / "tool").mkdir(parents=True)
    (root / "dataset_description.json").write_text(json.dumps({"Name": "test", "BIDSVersion": "1.10.0"}))
    (root / "derivatives" / "tool" / "dseg.tsv").write_text(DSEG_TSV)
    rows = ["participant_id\tage\tsex\tsite\tbatch"]
    for number in range(1, people + 1):
        person = f"sub-{number:02d}"
        rows.append(f"{person}\t{40 + 3 * number}\t{'MF'[number % 2]}\tX\t{batch(number)}")
        for count, session in enumerate(sessions):
            t1, dseg, affine = head(seed=100 * count + number)
            name = "_".join(part for part in (person, session) if part)
            anat = root / person / (session or ".") / "anat"
            save(anat / f"{name}_T1w.nii.gz", t1, affine)
            if labels:
                derived = root / "derivatives" / "tool" / person / (session or ".") / "anat"
                save(derived / f"{name}_dseg.nii.gz", dseg, affine)
    (root / "participants.tsv").write_text(table if table is not None else "\n".join(rows) + "\n")
    return root


def truncate(path):
    """Cuts a gzip file in the middle."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def rewrite(path, change):
    """Stores an image with changed voxels or affine: ``change(data, affine)`` returns both."""
    image = nibabel.load(path)
    data, affine = change(np.asanyarray(image.dataobj), image.affine)
    return save(path, data, affine)


def unpacked(path):
    return gzip.decompress(path.read_bytes())
