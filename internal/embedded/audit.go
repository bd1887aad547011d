package embedded

import "path/filepath"

// auditPolicy records the metadata of each write, and of each read of a Secret by users other than the managers. It never
// records bodies, because they can contain Secrets.
var auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: None
  resources:
  - group: coordination.k8s.io
    resources: [leases]
  - group: ""
    resources: [events]
  - group: events.k8s.io
    resources: [events]
- level: None
  users: ["` + serviceAccount(coreNamespace, coreServiceAccount).cn + `", "` + serviceAccount(managerNamespace, managerServiceAccount).cn + `", "system:kube-controller-manager", "system:apiserver"]
  verbs: [get, list, watch]
- level: Metadata
  verbs: [create, update, patch, delete, deletecollection]
- level: Metadata
  verbs: [get, list, watch]
  resources:
  - group: ""
    resources: [secrets]
- level: None
`

// Audit holds the audit log of the API server, whose user writes and rotates it.
func (l Layout) Audit() string { return filepath.Join(l.Root, "audit") }

// AuditLog is the newest file of the audit log: one JSON document per line, mode 0600.
func (l Layout) AuditLog() string { return filepath.Join(l.Audit(), "audit.log") }

func (l Layout) auditPolicy() string {
	return filepath.Join(l.Component(apiServer), "audit-policy.yaml")
}

// auditArgs keep the log of 30 days, in at most eleven files of 100 MiB. Older files are compressed.
func auditArgs(l Layout) []string {
	return []string{
		"--audit-policy-file=" + l.auditPolicy(), "--audit-log-path=" + l.AuditLog(),
		"--audit-log-maxage=30", "--audit-log-maxbackup=10", "--audit-log-maxsize=100", "--audit-log-compress",
	}
}
