"""A stand-in of the Hugging Face hub on the loopback: repositories in memory, behind the HTTP interface of the other.

Files of weights take the way of large ones: announced, uploaded on their own, named by their hash in the commit.
"""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

OWNER, TOKEN = "me", "hf_the_token_of_me"


class Hub(ThreadingHTTPServer):
    """``repos`` has the commits of every repository, each a mapping of paths to contents; the newest is the last."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos, self.large, self.asked = {}, {}, []

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_port}"

    def files(self, repo):
        return self.repos[repo][-1]


@contextmanager
def running_hub():
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


def commit_hash(repo, commits):
    return hashlib.sha1(f"{repo} {len(commits)}".encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        self.answer("POST")

    def do_PUT(self):
        self.answer("PUT")

    def do_GET(self):
        self.answer("GET")

    def do_HEAD(self):
        self.answer("HEAD")

    def answer(self, method):
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{method} {path}")
        body = self.body()
        for verb, pattern, respond in ROUTES:
            found = re.fullmatch(pattern, path)
            if found and method in verb.split():
                respond(self, *found.groups(), **({"body": body} if method in ("POST", "PUT") else {}))
                return
        self.refuse(404, "EntryNotFound")

    def body(self):
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def say(self, content, status=200, **headers):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, status, code="", **said):
        self.say({"error": code, **said}, status, X_Error_Code=code)

    def may_write(self, owner):
        """Whoever has the token may write to what belongs to its owner; the answer is given otherwise."""
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.refuse(401)
        elif owner != OWNER:
            self.refuse(403)
        else:
            return True
        return False

    def create(self, body):
        wish = json.loads(body)
        repo = f"{wish['organization']}/{wish['name']}"
        if self.may_write(wish["organization"]):
            is_new = repo not in self.server.repos
            self.server.repos.setdefault(repo, [{}])
            self.say({"url": f"{self.server.endpoint}/{repo}", "name": repo}, 200 if is_new else 409)

    def validate(self, body):
        card = json.loads(body)["content"]
        is_valid = "license: none of these" not in card
        errors = [] if is_valid else [{"message": "license must be one of …"}]
        self.say({"errors": errors, "warnings": []}, 200 if is_valid else 400)

    def preupload(self, owner, name, body):
        if self.may_write(owner):
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": path, "shouldIgnore": False, "uploadMode": way_of(path)} for path in names]
            self.say({"files": modes})

    def batch(self, owner, name, body):
        if self.may_write(owner):
            way = f"{self.server.endpoint}/large"
            objects = json.loads(body)["objects"]
            for wanted in objects:
                verify = {"href": f"{way}/verify"}
                wanted["actions"] = {"upload": {"href": f"{way}/{wanted['oid']}"}, "verify": verify}
            self.say({"transfer": "basic", "objects": objects})

    def upload(self, oid, body):
        if hashlib.sha256(body).hexdigest() != oid:
            self.refuse(422)
            return
        self.server.large[oid] = body
        self.say({})

    def verify(self, body):
        wanted = json.loads(body)
        is_there = len(self.server.large.get(wanted["oid"], b"")) == wanted["size"]
        self.say({}, 200 if is_there else 404)

    def commit(self, owner, name, body):
        if not self.may_write(owner):
            return
        repo = f"{owner}/{name}"
        commits = self.server.repos[repo]
        files = dict(commits[-1])
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        commits.append(files)
        oid = commit_hash(repo, commits)
        self.say({"success": True, "commitOid": oid, "commitUrl": f"{self.server.endpoint}/{repo}/commit/{oid}"})

    def known(self, owner, name):
        repo = f"{owner}/{name}"
        if repo not in self.server.repos:
            self.refuse(404, "RepoNotFound")
            return None
        return repo

    def info(self, owner, name):
        if repo := self.known(owner, name):
            siblings = [{"rfilename": path} for path in self.server.files(repo)]
            sha = commit_hash(repo, self.server.repos[repo])
            self.say({"id": repo, "sha": sha, "siblings": siblings, "private": False, "tags": [], "downloads": 0})

    def tree(self, owner, name):
        if repo := self.known(owner, name):
            self.say([entry(path, content) for path, content in self.server.files(repo).items()])

    def resolve(self, owner, name, path):
        if not (repo := self.known(owner, name)):
            return
        content = self.server.files(repo).get(path)
        if content is None:
            self.refuse(404, "EntryNotFound")
            return
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        self.say(content, ETag=etag, X_Repo_Commit=commit_hash(repo, self.server.repos[repo]))


def way_of(path):
    return "lfs" if path.endswith(".safetensors") else "regular"


def entry(path, content):
    """A file as the hub lists it."""
    digest = hashlib.sha256(content).hexdigest()
    large = {"lfs": {"oid": digest, "size": len(content), "pointerSize": 134}} if way_of(path) == "lfs" else {}
    return {"type": "file", "path": path, "size": len(content), "oid": digest[:40], **large}


REPO = "([^/]+)/([^/]+)"
ROUTES = [
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("POST", f"/api/models/{REPO}/preupload/main", Handler.preupload),
    ("POST", f"/{REPO}\\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", "/large/([0-9a-f]{64})", Handler.upload),
    ("POST", "/large/verify", Handler.verify),
    ("POST", f"/api/models/{REPO}/commit/main", Handler.commit),
    ("GET", f"/api/models/{REPO}(?:/revision/[^/]+)?", Handler.info),
    ("GET", f"/api/models/{REPO}/tree/[^/]+", Handler.tree),
    ("GET HEAD", f"/{REPO}/resolve/[^/]+/(.+)", Handler.resolve),
]
