"""Owns who is asking: API key → tenant. Keys are known by their sha256 only."""

from __future__ import annotations

import hmac

from orchestrator.config import Config, TenantConfig, hash_key
from policies.errors import PermissionDenied, Unauthorized


class Tenants:
    """The configured tenants, by key."""

    def __init__(self, config: Config) -> None:
        self._by_hash = [(digest, tenant) for tenant in config.tenants for digest in tenant.key_hashes]

    def authenticate(self, authorization: str | None) -> TenantConfig:
        """The tenant of an ``Authorization: Bearer KEY`` header; Unauthorized if there is none."""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("no API key: send 'Authorization: Bearer KEY'")
        offered = hash_key(key.strip())
        found = None
        for digest, tenant in self._by_hash:  # all of them, so that time tells nothing
            if hmac.compare_digest(digest, offered):
                found = tenant
        if found is None:
            raise Unauthorized("this API key is not known")
        return found

    def authenticate_admin(self, authorization: str | None) -> TenantConfig:
        tenant = self.authenticate(authorization)
        if not tenant.admin:
            raise PermissionDenied(f"tenant {tenant.name} may not use /admin")
        return tenant
