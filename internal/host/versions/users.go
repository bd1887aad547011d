package versions

import (
	"encoding/json"
	"fmt"
	"path/filepath"

	"google.golang.org/protobuf/encoding/protojson"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/updaterecord"
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
			if user := userOf(dir, version); user != "" {
				users = append(users, user)
			}
		}
	}
	return users, nil
}

// userOf describes the machine if it uses the version. A machine without a folder was deleted meanwhile; one without a spec is damaged.
func userOf(dir, version string) string {
	name, uses, err := machineUses(dir, version)
	switch {
	case err != nil && atomicfile.Exists(dir):
		return fmt.Sprintf("machine %s (its record is damaged)", filepath.Base(dir))
	case uses:
		return "machine " + name
	}
	return ""
}

// machineUses reads the record of a machine. During an update in place, the machine uses both versions.
func machineUses(dir, version string) (name string, uses bool, err error) {
	var data json.RawMessage
	if err := atomicfile.ReadJSON(filepath.Join(dir, "spec.json"), &data); err != nil {
		return "", false, err
	}
	spec := &hostpb.MachineSpec{}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(data, spec); err != nil {
		return "", false, err
	}
	name = spec.Namespace + "/" + spec.Name
	update, err := updaterecord.Load(dir)
	if err != nil {
		return name, false, err
	}
	if update == nil {
		return name, spec.KubernetesVersion == version, nil
	}
	succeeded := update.Phase == hostpb.UpdateStatus_SUCCEEDED
	uses = update.To.KubernetesVersion == version && (!update.Ended() || succeeded) || update.From.KubernetesVersion == version && !succeeded
	return name, uses, nil
}
