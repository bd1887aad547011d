// Package devices finds the devices of the host that machines can have: device nodes by path, and devices that the host describes
// with the Container Device Interface (CDI), for example GPUs.
//
// Layer: host. Allowed imports: api, library, contract.
package devices

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
)

// SpecDirs are the folders with CDI specifications of the host, as container engines read them. Later ones have priority.
var SpecDirs = []string{"/etc/cdi", "/var/run/cdi"}

// maxKinds bounds the report of a host.
const maxKinds = 64

// Node returns the device node of a path for the configuration of a container. A symbolic link is followed, because udev makes
// stable names with them. The node has the mode that it has on the host.
func Node(path string) (specs.LinuxDevice, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return specs.LinuxDevice{}, fmt.Errorf("expected the device node %s on the host, found none: load its driver, or choose another host", path)
		}
		return specs.LinuxDevice{}, fmt.Errorf("device node %s: %w", path, err)
	}
	kind, known := map[uint32]string{unix.S_IFCHR: "c", unix.S_IFBLK: "b"}[st.Mode&unix.S_IFMT]
	if !known {
		return specs.LinuxDevice{}, fmt.Errorf("expected a device node, found another kind of file at %s", path)
	}
	mode := os.FileMode(st.Mode & 0o777)
	return specs.LinuxDevice{
		Path: path, Type: kind, FileMode: &mode,
		Major: int64(unix.Major(uint64(st.Rdev))), Minor: int64(unix.Minor(uint64(st.Rdev))), //nolint:unconvert // its type differs by architecture
	}, nil
}

// CDI contains the CDI devices of the host.
type CDI struct {
	mu    sync.Mutex
	cache *cdi.Cache
	kinds map[string][]string
}

// NewCDI reads the specifications in the folders. A folder that does not exist is empty.
func NewCDI(dirs ...string) (*CDI, error) {
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dirs...), cdi.WithAutoRefresh(false))
	if err != nil {
		return nil, fmt.Errorf("reading the CDI specifications: %w", err)
	}
	c := &CDI{cache: cache}
	c.kinds = c.read()
	return c, nil
}

// Scan reads the specifications again, and returns whether the devices have changed. The error is about single specifications: the
// devices of the others are known.
func (c *CDI) Scan() (changed bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	err = c.cache.Refresh()
	before := c.kinds
	c.kinds = c.read()
	return !maps.EqualFunc(before, c.kinds, slices.Equal), err
}

// Kinds returns the names of the devices of each kind, in their order. Names of one device, and names of several devices together,
// count once: see distinct. A host without CDI has none.
func (c *CDI) Kinds() map[string][]string {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.kinds
}

// read returns the devices of the cache; mu is held.
func (c *CDI) read() map[string][]string {
	all := map[string]map[string][]string{}
	for _, qualified := range c.cache.ListDevices() {
		device := c.cache.GetDevice(qualified)
		if device == nil {
			continue
		}
		kind := device.GetSpec().Kind
		if all[kind] == nil {
			all[kind] = map[string][]string{}
		}
		nodes := []string{}
		for _, node := range device.ContainerEdits.DeviceNodes {
			nodes = append(nodes, cmp.Or(node.HostPath, node.Path))
		}
		all[kind][device.Name] = nodes
	}
	out := map[string][]string{}
	for _, kind := range slices.Sorted(maps.Keys(all)) {
		if len(out) < maxKinds {
			out[kind] = distinct(all[kind])
		}
	}
	return out
}

// distinct returns the names of different devices. A specification can contain a device under several names, such as its number
// and its serial number, and a name for all devices together. Devices that have a device node in common are the same device, except
// for nodes that all devices have, which belong to the driver. Of several names, the one with the fewest nodes counts, then the
// shortest and first one. nodes are the device nodes of each name. Devices without nodes are different ones.
func distinct(nodes map[string][]string) []string {
	var names, out []string
	seen := map[string]bool{}
	if len(nodes) > 1 {
		delete(nodes, "all")
	}
	for _, name := range slices.SortedFunc(maps.Keys(nodes), naturally) {
		slices.Sort(nodes[name])
		if key := strings.Join(nodes[name], "\n"); key == "" || !seen[key] {
			seen[key] = true
			names = append(names, name)
		}
	}
	count := map[string]int{}
	for _, name := range names {
		for _, node := range nodes[name] {
			count[node]++
		}
	}
	slices.SortStableFunc(names, func(a, b string) int { return cmp.Compare(len(nodes[a]), len(nodes[b])) })
	taken := map[string]bool{}
	for _, name := range names {
		own := slices.DeleteFunc(slices.Clone(nodes[name]), func(node string) bool { return len(names) > 1 && count[node] == len(names) })
		if slices.ContainsFunc(own, func(node string) bool { return taken[node] }) {
			continue
		}
		for _, node := range own {
			taken[node] = true
		}
		out = append(out, name)
	}
	slices.SortFunc(out, naturally)
	return out
}

// naturally compares names by length, so that 10 comes after 9.
func naturally(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) }

// Choose returns the qualified names of count devices of a kind that are not in use, or nil if there are too few.
func (c *CDI) Choose(kind string, count int, used map[string]bool) []string {
	vendor, class := parser.ParseQualifier(kind)
	var out []string
	for _, name := range c.Kinds()[kind] {
		if qualified := parser.QualifiedName(vendor, class, name); !used[qualified] && len(out) < count {
			out = append(out, qualified)
		}
	}
	if len(out) < count {
		return nil
	}
	return out
}

// Inject adds devices to the configuration of a container. It reads the specifications again, so that devices that have changed are
// those of now.
func (c *CDI) Inject(spec *specs.Spec, qualified []string) error {
	if len(qualified) == 0 {
		return nil
	}
	if c == nil {
		return errors.New("this host has no CDI devices")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = c.cache.Refresh() // Its errors are about single specifications. Those of these devices are found below.
	if missing, err := c.cache.InjectDevices(spec, qualified...); err != nil {
		if len(missing) > 0 {
			return fmt.Errorf("expected the CDI devices %s on the host, found none of that name in %s: restore their specification, or replace the machine",
				strings.Join(missing, ", "), strings.Join(c.cache.GetSpecDirectories(), " and "))
		}
		return fmt.Errorf("adding the CDI devices %s to the machine: %w", strings.Join(qualified, ", "), err)
	}
	return nil
}
