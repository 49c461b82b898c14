// Colours of tokens: an alpha over the page's own ground, so that they work in both themes.

const HUES = [220, 28, 160, 290, 50, 340, 190, 100];

export function heat(share) {
  return `rgb(var(--heat) / ${(0.06 + 0.64 * Math.min(1, Math.max(0, share))).toFixed(3)})`;
}

export function signed(share) {
  const size = (0.08 + 0.6 * Math.min(1, Math.abs(share))).toFixed(3);
  return `rgb(var(${share < 0 ? "--heat" : "--cool"}) / ${size})`;
}

export function category(index) {
  return `hsl(${HUES[index % HUES.length]} 70% 50% / 0.3)`;
}

export function runColor(index) {
  return `var(--run-${index % 6})`;
}

export function rewardColor(reward, low, high) {
  if (reward === null || high <= low) return "transparent";
  return signed((((reward - low) / (high - low)) * 2 - 1) * 0.6);
}
