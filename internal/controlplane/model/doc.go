// Package model contains the state of a control plane in one reconciliation, and every decision about it: scaling,
// rollout, remediation, departure of Machines and etcd members, rotation of the certificate authority, backup and restore.
//
// The package contains data and functions of data, without connections, locks and clocks. ControlPlane.Now is the time of the
// reconciliation. Each decision has a table test.
//
// It must not import internal/controlplane or use a client.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package model
