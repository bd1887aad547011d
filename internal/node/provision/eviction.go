package provision

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	kubeletv1beta1 "k8s.io/kubelet/config/v1beta1"
	"sigs.k8s.io/yaml"
)

// EvictionSpace returns the free space of the machine's disk, in bytes, below which its kubelet evicts pods. It is 0 if the kubelet has no
// configuration, or none for the disk.
func EvictionSpace(diskBytes int64) (int64, error) {
	return evictionSpace(kubeletConfigFile, diskBytes)
}

func evictionSpace(path string, diskBytes int64) (space int64, err error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	var config kubeletv1beta1.KubeletConfiguration
	if err := errors.Join(err, yaml.Unmarshal(data, &config)); err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	for _, thresholds := range []map[string]string{config.EvictionHard, config.EvictionSoft} {
		for _, signal := range []string{"nodefs.available", "imagefs.available"} { // The machine has one disk for both.
			least, err := threshold(thresholds[signal], diskBytes)
			if err != nil {
				return 0, fmt.Errorf("%s: eviction at %s %q: %w", path, signal, thresholds[signal], err)
			}
			space = max(space, least)
		}
	}
	return space, nil
}

// threshold reads a quantity, or a percentage of the disk. For the kubelet, 0% and 100% are no threshold.
func threshold(text string, diskBytes int64) (int64, error) {
	if text == "" {
		return 0, nil
	}
	if percent, ok := strings.CutSuffix(text, "%"); ok {
		share, err := strconv.ParseFloat(percent, 64)
		if share == 100 {
			return 0, err
		}
		return int64(share / 100 * float64(diskBytes)), err
	}
	quantity, err := resource.ParseQuantity(text)
	return quantity.Value(), err
}
