package v1beta2

import "encoding/json"

// FirstMachineAnnotation holds the name of the Machine that begins the cluster, as a FirstMachine in JSON. The control plane
// provider writes it before it makes the Machine; it survives a move and a backup.
const FirstMachineAnnotation = "controlplane.capstan.dev/first-machine"

// FirstMachine is the Machine that begins a cluster.
type FirstMachine struct {
	// Name of the Machine.
	Name string `json:"name"`
	// Restore is the restore that the Machine begins with; empty when it begins with an empty etcd.
	Restore string `json:"restore,omitempty"`
}

// GetFirstMachine reads the annotation. The Name is empty if the annotation is missing or invalid.
func GetFirstMachine(controlPlane *CapstanControlPlane) FirstMachine {
	var out FirstMachine
	if err := json.Unmarshal([]byte(controlPlane.Annotations[FirstMachineAnnotation]), &out); err != nil {
		return FirstMachine{}
	}
	return out
}
