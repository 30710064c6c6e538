"""The Pod Security Standards, as the API server's PodSecurity admission checks them, for the fields that matter here.

Written after kubernetes/pod-security-admission: policy (v1.36). The messages are those of its refusals, so a test
matches what a user sees; `tests.envtest` compares the two.
"""

from collections.abc import Callable, Iterator
from typing import Any

Object = dict[str, Any]

_BASELINE_CAPABILITIES = frozenset(
    {"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP"}
    | {"SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"}
)
_VOLUMES = frozenset(
    {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
)


def violations(level: str, spec: Object) -> list[str]:
    """The violations of `level` (privileged, baseline, restricted) by a pod, as in the admission's message."""
    checks: list[Callable[[Object], str]] = []
    if level in ("baseline", "restricted"):
        checks += [_host_namespaces, _privileged, _host_path]
    if level == "baseline":
        checks += [_baseline_capabilities]
    if level == "restricted":
        checks += [_escalation, _capabilities, _volumes, _non_root, _root_user, _seccomp]
    return [violation for check in checks if (violation := check(spec))]


def refusal(pod: str, level: str, found: list[str]) -> str:
    """The message of the API server."""
    return f'pods "{pod}" is forbidden: violates PodSecurity "{level}:latest": {", ".join(found)}'


def _containers(spec: Object) -> Iterator[tuple[str, Object, Object]]:
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for container in spec.get(kind) or []:
            yield container["name"], container, container.get("securityContext") or {}


def _named(names: list[str]) -> str:
    quoted = ", ".join(f'"{name}"' for name in names)
    return f"container{'s' if len(names) > 1 else ''} {quoted}"


def _host_namespaces(spec: Object) -> str:
    fields = [f"{field}=true" for field in ("hostNetwork", "hostPID", "hostIPC") if spec.get(field)]
    return f"host namespaces ({', '.join(fields)})" if fields else ""


def _privileged(spec: Object) -> str:
    names = [name for name, _, context in _containers(spec) if context.get("privileged")]
    return f"privileged ({_named(names)} must not set securityContext.privileged=true)" if names else ""


def _host_path(spec: Object) -> str:
    names = [volume["name"] for volume in spec.get("volumes") or [] if "hostPath" in volume]
    quoted = ", ".join(f'"{name}"' for name in names)
    return f"hostPath volumes (volume{'s' if len(names) > 1 else ''} {quoted})" if names else ""


def _baseline_capabilities(spec: Object) -> str:
    added_by_container = {
        name: sorted(set((context.get("capabilities") or {}).get("add") or []) - _BASELINE_CAPABILITIES)
        for name, _, context in _containers(spec)
    }
    names = [name for name, added in added_by_container.items() if added]
    added = ", ".join(
        f'"{capability}"'
        for capability in sorted(
            {capability for capabilities in added_by_container.values() for capability in capabilities}
        )
    )
    return (
        f"non-default capabilities ({_named(names)} must not include {added} in securityContext.capabilities.add)"
        * bool(names)
    )


def _escalation(spec: Object) -> str:
    names = [name for name, _, context in _containers(spec) if context.get("allowPrivilegeEscalation") is not False]
    text = "must set securityContext.allowPrivilegeEscalation=false"
    return f"allowPrivilegeEscalation != false ({_named(names)} {text})" if names else ""


def _capabilities(spec: Object) -> str:
    missing, added = [], []
    for name, _, context in _containers(spec):
        capabilities = context.get("capabilities") or {}
        if "ALL" not in (capabilities.get("drop") or []):
            missing.append(name)
        if set(capabilities.get("add") or []) - {"NET_BIND_SERVICE"}:
            added.append(name)
    texts = []
    if missing:
        texts.append(f'{_named(missing)} must set securityContext.capabilities.drop=["ALL"]')
    if added:
        more = sorted(
            {
                capability
                for name, _, context in _containers(spec)
                if name in added
                for capability in context["capabilities"]["add"]
                if capability != "NET_BIND_SERVICE"
            }
        )
        quoted = ", ".join(f'"{capability}"' for capability in more)
        texts.append(f"{_named(added)} must not include {quoted} in securityContext.capabilities.add")
    return f"unrestricted capabilities ({'; '.join(texts)})" if texts else ""


def _volumes(spec: Object) -> str:
    names = [volume["name"] for volume in spec.get("volumes") or [] if not _VOLUMES & volume.keys()]
    return f"restricted volume types ({', '.join(names)})" if names else ""


def _non_root(spec: Object) -> str:
    whole = (spec.get("securityContext") or {}).get("runAsNonRoot")
    names = [name for name, _, context in _containers(spec) if context.get("runAsNonRoot", whole) is not True]
    text = "must set securityContext.runAsNonRoot=true"
    return f"runAsNonRoot != true (pod or {_named(names)} {text})" if names else ""


def _root_user(spec: Object) -> str:
    names = [name for name, _, context in _containers(spec) if context.get("runAsUser") == 0]
    if (spec.get("securityContext") or {}).get("runAsUser") == 0:
        return "runAsUser=0 (pod must not set runAsUser=0)"
    return f"runAsUser=0 ({_named(names)} must not set runAsUser=0)" if names else ""


def _seccomp(spec: Object) -> str:
    def profile(context: Object) -> str | None:
        profile_type = (context.get("seccompProfile") or {}).get("type")
        return str(profile_type) if profile_type else None

    whole = profile(spec.get("securityContext") or {})
    names = [
        name
        for name, _, context in _containers(spec)
        if (profile(context) or whole) not in ("RuntimeDefault", "Localhost")
    ]
    text = 'must set securityContext.seccompProfile.type to "RuntimeDefault" or "Localhost"'
    return f"seccompProfile (pod or {_named(names)} {text})" if names else ""
