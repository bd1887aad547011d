// Package conversion converts the kinds of Capstan between v1beta2, the hub and storage version, and v1beta1.
//
// The spec is the same type in both versions, except for the machine template of control planes. Each field of the
// status has a field in both versions, directly or below status.v1beta2 of v1beta1. Therefore no annotation carries the
// difference: Cluster API's conversion-data annotation would contain the whole hub object, and a machine pool with
// thousands of machines would exceed the limit of 256 KiB for annotations. The remaining fields of the v1beta1 status
// are views: this package derives them from the hub and ignores them on the way back.
//
// Layer: library. Allowed imports: api.
package conversion
