// Package inplace decides which differences between two specs of a machine can be applied to the existing machine.
//
// It is a pure function of both specs. The table fields has one decision for each field of CapstanMachineSpec and
// CapstanConfigSpec. A test walks over the types and fails for a field without a decision, so a new field needs one. The
// control plane provider, machine pools and the runtime extension of MachineDeployments share these decisions.
//
// Layer: contract. Allowed imports: api, library.
package inplace
