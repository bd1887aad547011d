package runc

import (
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/capability"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// HostSystem detects the layout of the host's programs and its optional devices.
func HostSystem() System { return SystemOf("/") }

// SystemOf detects the layout of the programs of a root file system. The devices are those of the host.
func SystemOf(root string) System {
	s := System{Root: root, Links: map[string]string{}, Folders: []string{"/usr"}}
	for _, name := range []string{"bin", "sbin", "lib", "lib32", "lib64", "libx32"} {
		path := filepath.Join(root, name)
		if target, err := os.Readlink(path); err == nil {
			s.Links[name] = target
		} else if info, err := os.Lstat(path); err == nil && info.IsDir() {
			s.Folders = append(s.Folders, "/"+name)
		}
	}
	for _, path := range []string{"/dev/fuse", "/dev/net/tun"} {
		var st unix.Stat_t
		if unix.Stat(path, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR {
			mode := os.FileMode(0o666)
			s.Devices = append(s.Devices, specs.LinuxDevice{
				Path: path, Type: "c", FileMode: &mode,
				Major: int64(unix.Major(uint64(st.Rdev))), Minor: int64(unix.Minor(uint64(st.Rdev))), //nolint:unconvert // its type differs by architecture
			})
		}
	}
	s.AppArmor = hasAppArmor(securityFS, "/sys/module/apparmor/parameters/enabled")
	return s
}

// securityFS is the folder in which Linux security modules have their files.
const securityFS = "/sys/kernel/security"

// hasAppArmor reports whether AppArmor is enabled and its files are visible below the mount point of securityfs. enabled is the
// file with the parameter of the module.
func hasAppArmor(securityFS, enabled string) bool {
	on, err := os.ReadFile(enabled)
	if err != nil || !strings.HasPrefix(string(on), "Y") {
		return false
	}
	info, err := os.Stat(filepath.Join(securityFS, "apparmor"))
	return err == nil && info.IsDir()
}

// OwnCapabilities returns the names of the capabilities that this process can pass on.
func OwnCapabilities() ([]string, error) {
	own, err := capability.NewPid2(0)
	if err != nil {
		return nil, err
	}
	if err := own.Load(); err != nil {
		return nil, err
	}
	var names []string
	for _, c := range capability.ListKnown() {
		if own.Get(capability.BOUNDING, c) && own.Get(capability.PERMITTED, c) {
			names = append(names, "CAP_"+strings.ToUpper(c.String()))
		}
	}
	slices.Sort(names)
	return names, nil
}
