// Package model contains the state of a control plane in one reconciliation, and every decision about it: scaling,
// rollout, remediation, departure of Machines and etcd members, rotation of the certificate authority, backup and restore.
//
// All of it is data and functions of data. Nothing here has a connection, a lock on an object or a clock of its own:
// ControlPlane.Now is the time of the reconciliation. So each decision has a table test beside it.
//
// The package may import API types, Cluster API's helpers without a client, internal/bootstrap/render, internal/pki and
// internal/node/nodeconfig. It must not import internal/controlplane or a client.
//
// Layer: reconciler.
package model
