package versions

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"google.golang.org/protobuf/encoding/protojson"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/hostpb"
)

// Machines returns the machines that use a version, from the state folders of capstands. A machine with a damaged record counts as a
// user of every version.
func Machines(version string, roots ...string) (users []string, err error) {
	for _, root := range roots {
		dirs, err := filepath.Glob(filepath.Join(root, "machines", "*"))
		if err != nil {
			return nil, err
		}
		for _, dir := range dirs {
			name, uses, err := machineUses(dir, version)
			switch {
			case errors.Is(err, fs.ErrNotExist): // The machine was deleted meanwhile.
			case err != nil:
				users = append(users, fmt.Sprintf("machine %s (its record is damaged)", filepath.Base(dir)))
			case uses:
				users = append(users, "machine "+name)
			}
		}
	}
	return users, nil
}

// machineUses reads the record of a machine. During an update in place, the machine uses both versions.
func machineUses(dir, version string) (name string, uses bool, err error) {
	var data json.RawMessage
	if err := atomicfile.ReadJSON(filepath.Join(dir, "spec.json"), &data); err != nil {
		return "", false, err
	}
	spec, err := machineSpec(data)
	if err != nil {
		return "", false, err
	}
	name = spec.GetNamespace() + "/" + spec.GetName()
	var update struct {
		Phase    hostpb.UpdateStatus_Phase `json:"phase"`
		From, To json.RawMessage
	}
	if err := atomicfile.ReadJSON(filepath.Join(dir, "update.json"), &update); errors.Is(err, fs.ErrNotExist) {
		return name, spec.GetKubernetesVersion() == version, nil
	} else if err != nil {
		return name, false, err
	}
	from, err1 := machineSpec(update.From)
	to, err2 := machineSpec(update.To)
	ended, succeeded := admission.Ended(&hostpb.UpdateStatus{Phase: update.Phase}), update.Phase == hostpb.UpdateStatus_SUCCEEDED
	uses = to.GetKubernetesVersion() == version && (!ended || succeeded) || from.GetKubernetesVersion() == version && !succeeded
	return name, uses, errors.Join(err1, err2)
}

func machineSpec(data []byte) (*hostpb.MachineSpec, error) {
	spec := &hostpb.MachineSpec{}
	return spec, protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(data, spec)
}
