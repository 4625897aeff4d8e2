"""Checks packaging/kubernetes: kubernetes_check.py LMC

Helm's own library lints the chart and installs it, with several values, at a server that stands for
Kubernetes: it takes every object, and keeps it. Each object that Helm sent is valid for several
versions of Kubernetes, and so is the example. The flags of the container are flags of `lmc serve`,
and the example's line for vLLM is what `lmc serve` prints.

Prints one line a check and ends with `N passed, N failed`.
"""

import asyncio
import contextlib
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading

import helm_sdkpy
import kubernetes_validate
import yaml

from checks import check, finish

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FOLDER = os.path.join(ROOT, "packaging", "kubernetes")
CHART = os.path.join(FOLDER, "chart")
VERSIONS = ("1.30", "1.33", "1.36")
DEADLINE = 60
AFFINITY = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
    {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]}}}
MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
# Kinds of the objects, by the path of their API.
KINDS = {"/api/v1": {"services": "Service", "secrets": "Secret"},
         "/apis/apps/v1": {"daemonsets": "DaemonSet"},
         "/apis/networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"}}


class Kubernetes(http.server.BaseHTTPRequestHandler):
    """A server that takes and returns objects as Kubernetes does, and runs nothing."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, body, code=200):
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def missing(self):
        self.answer({"kind": "Status", "apiVersion": "v1", "status": "Failure",
                     "reason": "NotFound", "code": 404}, 404)

    def do_GET(self):
        path = self.path.split("?")[0].rstrip("/")
        objects = self.server.objects
        if path == "/version":
            self.answer({"major": "1", "minor": "33", "gitVersion": "v1.33.0"})
        elif path == "/api":
            self.answer({"kind": "APIVersions", "versions": ["v1"]})
        elif path == "/apis":
            names = [group.split("/")[2:] for group in KINDS if group.startswith("/apis")]
            groups = [{"name": name, "versions": [{"groupVersion": f"{name}/{version}",
                                                   "version": version}],
                       "preferredVersion": {"groupVersion": f"{name}/{version}",
                                            "version": version}} for name, version in names]
            self.answer({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        elif path in KINDS:
            resources = [{"name": name, "singularName": "", "namespaced": True, "kind": kind,
                          "verbs": ["create", "get", "list", "patch", "update"]}
                         for name, kind in KINDS[path].items()]
            self.answer({"kind": "APIResourceList", "groupVersion": path.split("/", 2)[2],
                         "resources": resources})
        elif path in objects:
            self.answer(objects[path])
        elif path.rsplit("/", 1)[-1] in ("secrets",):
            found = [it for at, it in objects.items() if at.startswith(path + "/")]
            self.answer({"kind": "SecretList", "apiVersion": "v1", "metadata": {}, "items": found})
        else:
            self.missing()

    def body(self):
        """The object that was sent. Helm's record of a release comes in another format, and is a
        Secret that this program does not read."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if content.startswith(b"k8s\0"):
            return {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "release"}}
        return json.loads(content)

    def do_POST(self):
        body = self.body()
        path = self.path.split("?")[0]
        self.server.objects[f"{path}/{body['metadata']['name']}"] = body
        self.answer(body, 201)

    def do_PUT(self):
        body = self.body()
        self.server.objects[self.path.split("?")[0]] = body
        self.answer(body)


@contextlib.contextmanager
def kubernetes():
    """A running server, its objects, and the file that leads Helm to it."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Kubernetes)
    server.objects = {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = {"apiVersion": "v1", "kind": "Config", "current-context": "it",
              "clusters": [{"name": "it", "cluster": {
                  "server": f"http://127.0.0.1:{server.server_port}"}}],
              "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
              "users": [{"name": "it", "user": {}}]}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(config, file)
        file.flush()
        try:
            yield file.name, server.objects
        finally:
            server.shutdown()
            server.server_close()


def installed(name, values):
    """The objects that Helm sends for a release with these values, by their kind."""
    with kubernetes() as (config, objects):
        helm = helm_sdkpy.Configuration(namespace="models", kubeconfig=config)
        asyncio.run(helm_sdkpy.Install(helm).run(name, CHART, values, wait=False,
                                                 timeout=DEADLINE))
        return {it["kind"]: it for it in objects.values() if it["kind"] != "Secret"}


def valid(name, found):
    """Whether an object is one of Kubernetes, in each version."""
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(found, version, strict=True)
            why = ""
        except Exception as error:  # Of several libraries.
            why = str(error).splitlines()[0]
        check(f"{name} is valid for Kubernetes {version}", not why, why)


def chart(lmc):
    """The chart, by Helm."""
    with kubernetes() as (config, _):
        helm = helm_sdkpy.Configuration(namespace="models", kubeconfig=config)
        said = asyncio.run(helm_sdkpy.Lint(helm).run(CHART))
    check("helm lint finds no error", not said.get("errors") and not said.get("Errors"), str(said))
    found = installed("lmc", {})
    check("the chart has a DaemonSet, a Service and a NetworkPolicy",
          sorted(found) == ["DaemonSet", "NetworkPolicy", "Service"], str(sorted(found)))
    for kind, it in found.items():
        valid(f"the chart's {kind}", it)
    container = daemon(lmc, found, 5555, 8080)
    check("the limit of memory of a small pool is 2 GiB and a 64th above it",
          container["resources"]["limits"]["memory"] == "10368Mi")
    ends(lmc, found, grace=90, drain=60, http=8080)
    full = installed("cache", {
        "poolGib": 100, "port": 6555, "httpPort": 9090, "networkPolicy": False,
        "runAsUser": 1000, "resources": {"cpu": "4"}, "affinity": AFFINITY,
        "drainSeconds": 120, "terminationGracePeriodSeconds": 45,
        "disk": {"path": "/data/lmc", "size": "2TiB"}, "args": ["--chunk-size=512"],
        "nodeSelector": {"gpu": "h100"}, "tolerations": [{"operator": "Exists"}],
        "priorityClassName": "system-node-critical", "imagePullSecrets": [{"name": "registry"}],
        "image": {"repository": "registry.example/lmc", "tag": "1"}})
    check("networkPolicy: false leaves the NetworkPolicy out",
          sorted(full) == ["DaemonSet", "Service"], str(sorted(full)))
    for kind, it in full.items():
        valid(f"with every value, the chart's {kind}", it)
    container = daemon(lmc, full, 6555, 9090)
    check("the values reach the server", {"--disk=/var/lib/lmc-disk", "--disk-size=2TiB",
                                          "--chunk-size=512", "--l1-size-gb=100GiB"}
          <= set(container["args"]), str(container["args"]))
    check("the image is the one of the values", container["image"] == "registry.example/lmc:1")
    resources = container["resources"]
    check("the limit of memory is 2 GiB and a 64th above the pool, and is reserved", resources == {
        "limits": {"memory": "106048Mi"}, "requests": {"memory": "106048Mi", "cpu": "4"}}, str(resources))
    ends(lmc, full, grace=165, drain=120, http=9090)
    pod = full["DaemonSet"]["spec"]["template"]["spec"]
    check("the server runs as the user of the values, on the nodes of the values",
          [pod["securityContext"][name] for name in ("runAsUser", "runAsGroup", "fsGroup")] == [1000] * 3
          and pod["affinity"] == AFFINITY and pod["nodeSelector"] == {"gpu": "h100"}, str(pod))
    tls = ["--http-tls-cert=/tls/tls.crt", "--http-tls-key=/tls/tls.key"]
    secure = installed("secure", {
        "httpScheme": "HTTPS", "drainSeconds": 20, "args": tls, "scrapeFrom": [MONITORING],
        "volumes": [{"name": "tls", "secret": {"secretName": "lmc-tls"}}],
        "volumeMounts": [{"name": "tls", "mountPath": "/tls", "readOnly": True}]})
    for kind, it in secure.items():
        valid(f"with HTTPS, the chart's {kind}", it)
    container = daemon(lmc, secure, 5555, 8080, scheme="HTTPS")
    # The command of a drain would need a certificate to trust.
    ends(lmc, secure, grace=50, drain=None, http=8080)
    mounts = {it["name"] for it in container["volumeMounts"]}
    volumes = {it["name"] for it in secure["DaemonSet"]["spec"]["template"]["spec"]["volumes"]}
    check("the files of the certificate are mounted",
          mounts == volumes and "tls" in mounts and set(tls) <= set(container["args"]), str(mounts))
    ingress = secure["NetworkPolicy"]["spec"]["ingress"]
    check("the pods of scrapeFrom reach HTTP only",
          {"from": [MONITORING], "ports": [{"port": "http"}]} in ingress, str(ingress))
    ends(lmc, installed("abrupt", {"drainSeconds": 0}), grace=30, drain=None, http=8080)


def ends(lmc, found, grace, drain, http):
    """How a pod of a release ends: in `grace` seconds, after a drain of at most `drain` seconds."""
    pod = found["DaemonSet"]["spec"]["template"]["spec"]
    seconds = pod["terminationGracePeriodSeconds"]
    check(f"a pod has {grace} s to end", seconds == grace, str(seconds))
    lifecycle = pod["containers"][0].get("lifecycle")
    if drain is None:
        check("the pod is not drained before it ends", lifecycle is None, str(lifecycle))
        return
    command = lifecycle["preStop"]["exec"]["command"]
    check(f"the pod is drained for {drain} s before it ends", command == [
        "/usr/bin/lmc", "drain", f"--timeout={drain}s", f"--url=http://127.0.0.1:{http}"], str(command))
    done = subprocess.run([lmc, *command[1:], "--help"], capture_output=True, text=True, timeout=DEADLINE)
    check("lmc drain takes these flags", done.returncode == 0, done.stderr)


def daemon(lmc, found, port, http, scheme="HTTP"):
    """The server of a release. Returns its container."""
    pod = found["DaemonSet"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    # The paths of drives and certificates are those of a node.
    flags = [flag for flag in container["args"] if not flag.startswith(("--disk", "--http-tls"))]
    done = subprocess.run([lmc, *flags, "--print-config"], capture_output=True, text=True,
                          timeout=DEADLINE, env={"PATH": os.environ["PATH"]})
    check("lmc serve takes the flags of the container", done.returncode == 0, done.stderr)
    paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"]
             for kind in ("startup", "readiness", "liveness")}
    check("probes ask /readyz and /livez", paths == {
        "startup": "/readyz", "readiness": "/readyz", "liveness": "/livez"}, str(paths))
    schemes = {container[f"{kind}Probe"]["httpGet"]["scheme"]
               for kind in ("startup", "readiness", "liveness")}
    scraped = found["DaemonSet"]["spec"]["template"]["metadata"]["annotations"]["prometheus.io/scheme"]
    check(f"probes and Prometheus use {scheme}", schemes == {scheme} and scraped == scheme.lower(),
          str(schemes))
    ports = {it["name"]: it["containerPort"] for it in container["ports"]}
    check("the ports are those of the values", ports == {"engines": port, "http": http}, str(ports))
    served = {it["targetPort"]: it["port"] for it in found["Service"]["spec"]["ports"]}
    check("the Service has the same ports", served == ports, str(served))
    selector = found["Service"]["spec"]["selector"]
    labels = found["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    check("the Service finds the pods", selector.items() <= labels.items(), str(selector))
    check("the Service leads to the pod of the same node",
          found["Service"]["spec"]["internalTrafficPolicy"] == "Local")
    check("the server is not root and may not become it", pod["securityContext"]["runAsNonRoot"]
          and not container["securityContext"]["allowPrivilegeEscalation"])
    return container


def example(lmc):
    """The example of an engine."""
    with open(os.path.join(FOLDER, "vllm.yaml")) as file:
        [found] = yaml.safe_load_all(file)
    valid("the example with vLLM", found)
    pod = found["spec"]["template"]["spec"]
    [line] = [arg.split("=", 1)[1] for arg in pod["containers"][0]["args"]
              if arg.startswith("--kv-transfer-config=")]
    given = json.loads(line)
    extra = given.pop("kv_connector_extra_config")
    check("the example's line for vLLM has the keys of docs/vllm.md", given == {
        "kv_connector": "LMCacheMPConnector", "kv_load_failure_policy": "recompute",
        "kv_role": "kv_both"}, line)
    service = installed("lmc", {})["Service"]
    check("it reaches the Service of a release named lmc",
          extra["lmcache.mp.host"] == f"tcp://{service['metadata']['name']}"
          and extra["lmcache.mp.port"] == 5555, str(extra))
    waits = pod["initContainers"][0]["args"]
    help_text = subprocess.run([lmc, waits[0], "--help"], capture_output=True, text=True,
                               timeout=DEADLINE).stdout
    check("it waits by a command of lmc", waits[1] in help_text, str(waits))
    shm = [it for it in pod["volumes"] if it.get("hostPath", {}).get("path") == "/dev/shm"]
    check("it shares /dev/shm of the node with the server", len(shm) == 1)


def main():
    [lmc] = sys.argv[1:]
    chart(lmc)
    example(lmc)
    finish()


if __name__ == "__main__":
    main()
